"""Private and version-dependent names of torch: all that anyflex uses.

torch promises nothing about these names. Each is looked up here, once, and every release of
`TESTED` has it. This module imports nothing of anyflex.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "TESTED",
    "GetAttrKey",
    "apply_of",
    "as_symbol_tensor",
    "batch_level",
    "break_graph",
    "dispatch_modes",
    "dual_level",
    "dynamo_constant",
    "dynamo_name",
    "forward_mode_enabled",
    "functorch_level",
    "in_dual_level",
    "is_batched",
    "is_functional",
    "is_mutable",
    "is_tested",
    "is_wrapped",
    "kept_out_of_graphs",
    "negated_view",
    "register_pytree_node",
    "release",
    "set_forward_mode",
    "torch_cache",
    "transform_stack",
    "version_counter",
    "without_modes",
]

Function = TypeVar("Function", bound=Callable[..., Any])

TESTED = ("2.11", "2.15")
"""Oldest and newest release of torch that the tests are run with."""


def release(version: str) -> tuple[int, int]:
    """Return major and minor of a version as torch writes it: (2, 13) of ``"2.13.0+cpu"``."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def is_tested(version: str) -> bool:
    """Whether this torch is one of those that the tests are run with."""
    oldest, newest = map(release, TESTED)
    return oldest <= release(version) <= newest


_torch: Any = torch
"""torch, of whose private names type checkers know nothing."""

dispatch_modes: Callable[[], int] = _torch._C._len_torch_dispatch_stack
"""Number of dispatch modes in force."""

transform_stack: Callable[[], Any] = _torch._C._functorch.peek_interpreter_stack
"""Innermost functorch transform, or None."""

functorch_level: Callable[[], int | None] = _torch._C._functorch.maybe_current_level
"""Depth of the functorch transforms in force, or None outside of them."""

batch_level: Callable[[Tensor], int] = _torch._C._functorch.maybe_get_level
"""Level of the transform that made a wrapped tensor, -1 of a plain one."""

is_wrapped: Callable[[Tensor], bool] = _torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a functorch transform made the tensor."""


def is_batched(tensor: Tensor) -> bool:
    """Whether vmap, or autograd's ``is_grads_batched=True``, made the tensor."""
    functorch = _torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def version_counter(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for one made under inference mode, which
    counts no changes."""
    return 0 if tensor.is_inference() else tensor._version


is_functional: Callable[[Tensor], bool] = _torch._is_functional_tensor
"""Whether functionalization wraps the tensor."""


def as_symbol_tensor(kind: type[Any], tensor: Tensor) -> Any:
    """Return `tensor` as an object of `kind`, a subclass of Tensor, without calling its
    ``__init__``."""
    return _torch.Tensor._make_subclass(kind, tensor)


without_modes: Callable[[], contextlib.AbstractContextManager[Any]] = (
    _torch.utils._python_dispatch._disable_current_modes
)
"""Context in which no dispatch mode is in force."""


def kept_out_of_graphs(function: Function) -> Function:
    """Decorator: a compiled graph breaks where the function is called.

    ``torch.compiler.disable`` does the same, and imports the compiler for it.
    """
    kept: Function = _torch._compile._disable_dynamo(function)
    return kept


register_pytree_node: Callable[..., None] = _torch.utils._pytree.register_pytree_node
GetAttrKey: Any = _torch.utils._pytree.GetAttrKey
"""Key of a pytree's leaf that is an attribute."""

negated_view: Callable[[Tensor], Tensor] = _torch._neg_view
"""View of the tensor with torch's negative bit set."""


def in_dual_level() -> bool:
    """Whether a level of ``torch.autograd.forward_ad`` is known to be in force."""
    return forward_ad._current_level != -1


dual_level: Callable[[ModuleType], int] = attrgetter("_current_level")
"""Takes `torch.autograd.forward_ad`. Below 0 where no tensor can have a tangent; a function in C,
since each call asks."""

forward_mode_enabled: Callable[[], bool] = _torch._C._is_fwd_grad_enabled
"""Whether forward-mode derivatives are switched on, which custom Functions switch off."""

set_forward_mode: Callable[[bool], None] = _torch._C._set_fwd_grad_enabled


def apply_of(kind: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``kind.apply`` without its look for functorch transforms."""
    above: Any = super(torch.autograd.Function, kind)
    apply: Callable[..., Any] = above.apply
    return apply


def is_mutable(operator: Any) -> bool:
    """Whether an operator (``torch.ops.aten.add_.Tensor``) writes to an argument, by its
    schema."""
    return bool(operator._schema.is_mutable)


def dynamo_constant(function: Function) -> Function:
    """Decorator: Dynamo calls the function while it traces, and takes the result for a constant.

    ``torch.compiler.assume_constant_result`` sets the same mark, and imports the compiler for it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


torch_cache: Any = importlib.import_module("torch.compiler._cache")
"""torch's cache bundles, with the types of artifacts that they may hold."""


def break_graph(reason: str) -> None:
    """End the graph that Dynamo traces; under ``fullgraph=True`` it raises with the reason."""
    torch._dynamo.decorators.graph_break(reason)


@functools.cache
def dynamo_name(path: str) -> Any:
    """Return ``torch._dynamo.<path>``; imports the compiler.

    Raises:
        ImportError: this torch lacks it.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(f"torch._dynamo.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"torch {torch.__version__} has no torch._dynamo.{path}") from error
