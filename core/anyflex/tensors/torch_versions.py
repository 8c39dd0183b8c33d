"""Private and version-dependent names of torch: all that anyflex uses.

torch promises nothing about these names. Each is looked up here, once, and every release of
`TESTED` has it. What `import anyflex` needs has a stand-in for a later torch that lacks it. This
module imports nothing of anyflex.
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
    "artifact_types",
    "as_symbol_tensor",
    "batch_level",
    "break_graph",
    "dispatch_modes",
    "dual_level",
    "dynamo_constant",
    "dynamo_name",
    "forward_mode_enabled",
    "fp32_setting",
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
    "whole_graph",
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


def _private(path: str, stand_in: Any) -> Any:
    """Return ``torch.<path>``, or the stand-in where this torch lacks it."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        return stand_in


# Without it each call goes through the dispatcher, as under a mode.
dispatch_modes: Callable[[], int] = _private("_C._len_torch_dispatch_stack", lambda: 1)
"""Number of dispatch modes in force."""

# Without these a call inside of a transform is refused for its tensors, not for the transform.
transform_stack: Callable[[], Any] = _private("_C._functorch.peek_interpreter_stack", lambda: None)
"""Innermost functorch transform, or None."""

functorch_level: Callable[[], int | None] = _private(
    "_C._functorch.maybe_current_level", lambda: None
)
"""Depth of the functorch transforms in force, or None outside of them."""

batch_level: Callable[[Tensor], int] = _private("_C._functorch.maybe_get_level", lambda tensor: -1)
"""Level of the transform that made a wrapped tensor, -1 of a plain one."""

is_wrapped: Callable[[Tensor], bool] = _private(
    "_C._functorch.is_functorch_wrapped_tensor", lambda tensor: False
)
"""Whether a functorch transform made the tensor."""


def is_batched(tensor: Tensor) -> bool:
    """Whether vmap, or autograd's ``is_grads_batched=True``, made the tensor."""
    functorch = _torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def version_counter(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for one made under inference mode, which
    counts no changes."""
    return 0 if tensor.is_inference() else tensor._version


is_functional: Callable[[Tensor], bool] = _private("_is_functional_tensor", lambda tensor: False)
"""Whether functionalization wraps the tensor."""


def as_symbol_tensor(kind: type[Any], tensor: Tensor) -> Any:
    """Return `tensor` as an object of `kind`, a subclass of Tensor, without calling its
    ``__init__``."""
    return _torch.Tensor._make_subclass(kind, tensor)


# torch's own attributes take five times as long, at each call in float32.
fp32_setting: Callable[[str, str], str] = _private(
    "_C._get_fp32_precision_getter",
    lambda backend, operation: getattr(getattr(torch.backends, backend), operation).fp32_precision,
)
"""``torch.backends.<backend>.<operation>.fp32_precision``, called with the two names."""


without_modes: Callable[[], contextlib.AbstractContextManager[Any]] = _private(
    "utils._python_dispatch._disable_current_modes", contextlib.nullcontext
)
"""Context in which no dispatch mode is in force."""


def kept_out_of_graphs(function: Function) -> Function:
    """Decorator: a compiled graph breaks where the function is called.

    ``torch.compiler.disable`` does the same, and imports the compiler for it.
    """
    kept: Function = _private("_compile._disable_dynamo", torch.compiler.disable)(function)
    return kept


# Without it a block mask is no argument of an exported program.
register_pytree_node: Callable[..., None] = _private(
    "utils._pytree.register_pytree_node", lambda *given, **named: None
)
GetAttrKey: Any = _private("utils._pytree.GetAttrKey", str)
"""Key of a pytree's leaf that is an attribute."""

negated_view: Callable[[Tensor], Tensor] = _private("_neg_view", torch.neg)
"""View of the tensor with torch's negative bit set."""


def in_dual_level() -> bool:
    """Whether a level of ``torch.autograd.forward_ad`` is known to be in force."""
    return forward_ad._current_level != -1


dual_level: Callable[[ModuleType], int] = attrgetter("_current_level")
"""Takes `torch.autograd.forward_ad`. Below 0 where no tensor can have a tangent; a function in C,
since each call asks."""

# Without both a mod with no_grad, or in a checkpoint, counts as one with a custom Function.
forward_mode_enabled: Callable[[], bool] = _private(
    "_C._is_fwd_grad_enabled", torch.is_grad_enabled
)
"""Whether forward-mode derivatives are switched on, which custom Functions switch off."""

set_forward_mode: Callable[[bool], None] = _private(
    "_C._set_fwd_grad_enabled", lambda enabled: None
)


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


torch_cache: Any = None
"""torch's cache bundles, or None in a torch that has others: they lack anyflex's kernels."""
artifact_types: Any = {}
"""Types of artifacts that torch's cache bundles may hold, by name."""
with contextlib.suppress(ImportError, AttributeError):
    _cache: Any = importlib.import_module("torch.compiler._cache")
    artifact_types = _cache.CacheArtifactFactory._artifact_types
    if hasattr(_cache, "CacheArtifact") and hasattr(_cache, "CacheArtifactManager"):
        torch_cache = _cache


def break_graph(reason: str) -> None:
    """End the graph that Dynamo traces; under ``fullgraph=True`` it raises with the reason."""
    torch._dynamo.decorators.graph_break(reason)


def whole_graph() -> bool:
    """Whether Dynamo traces under ``fullgraph=True``; False in a torch that says it otherwise."""
    try:
        current = dynamo_name("symbolic_convert.InstructionTranslator").current_tx()
        return bool(current.one_graph)
    except (ImportError, AttributeError):
        return False


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
