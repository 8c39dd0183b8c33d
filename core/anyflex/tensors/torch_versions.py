"""Private and version-dependent names of torch: all that anyflex uses, none of them required.

torch promises nothing about these names, and a release that drops one must not take anyflex down
with it. Each is looked up here, once, with the releases that it was seen in and with what anyflex
does without it; `anyflex doctor` lists those that the running torch lacks. This module imports
nothing of anyflex.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "DYNAMO_NAMES",
    "PRIVATE_NAMES",
    "TESTED",
    "CacheArtifact",
    "CacheArtifactFactory",
    "CacheArtifactManager",
    "GetAttrKey",
    "PrivateName",
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
    "functorch_level",
    "in_dual_level",
    "is_batched",
    "is_functional",
    "is_mutable",
    "is_tested",
    "is_wrapped",
    "is_zero_tensor",
    "kept_out_of_graphs",
    "missing_names",
    "negated_view",
    "register_pytree_node",
    "release",
    "set_forward_mode",
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


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A name that torch doesn't document, or that not every release has.

    Args:
        path: from ``torch`` on, ``"_C._functorch.is_batchedtensor"``.
        seen: releases that have it.
        without: what anyflex does in a torch that lacks it.
        found: this torch has it.
    """

    path: str
    seen: str
    without: str
    found: bool


PRIVATE_NAMES: list[PrivateName] = []
"""Every name that was looked up when anyflex was imported."""

_ALL = "2.11 to 2.15"


def _find(path: str, instead: Any, without: str, seen: str = _ALL) -> Any:
    """Return what ``torch.<path>`` is, or `instead` in a torch that lacks it."""
    *modules, last = path.split(".")
    found: Any = torch
    try:
        for name in modules:
            # torch imports some of its modules late: compiler._cache, before torch 2.13.
            if not hasattr(found, name):
                importlib.import_module(f"{found.__name__}.{name}")
            found = getattr(found, name)
        found = getattr(found, last)
    except (AttributeError, ImportError):
        PRIVATE_NAMES.append(PrivateName(path, seen, without, False))
        return instead
    PRIVATE_NAMES.append(PrivateName(path, seen, without, True))
    return found


def missing_names() -> list[PrivateName]:
    """Return the names that this torch lacks."""
    return [name for name in PRIVATE_NAMES if not name.found]


dispatch_modes: Callable[[], int] = _find(
    "_C._len_torch_dispatch_stack",
    lambda: 1,
    "every eager call goes through the dispatcher: slower, and mods that no graph can hold are "
    "refused",
)
"""Number of dispatch modes in force."""

transform_stack: Callable[[], Any] = _find(
    "_C._functorch.peek_interpreter_stack",
    lambda: None,
    "a call inside of vmap or grad is refused for its tensors, not for the transform",
)
"""Innermost functorch transform, or None."""

functorch_level: Callable[[], int | None] = _find(
    "_C._functorch.maybe_current_level",
    lambda: None,
    "a transform inside of a mod is refused as an unknown operation",
)
"""Depth of the functorch transforms in force, or None outside of them."""

batch_level: Callable[[Tensor], int] = _find(
    "_C._functorch.maybe_get_level",
    lambda tensor: -1,
    "a script function in a mod that no graph can hold is not refused",
)
"""Level of the transform that made a wrapped tensor, -1 of a plain one."""

is_wrapped: Callable[[Tensor], bool] = _find(
    "_C._functorch.is_functorch_wrapped_tensor",
    lambda tensor: False,
    "a block mask inside of a transform is refused for its tensors, not for the transform",
)
"""Whether a functorch transform made the tensor."""

_is_batched = _find(
    "_C._functorch.is_batchedtensor",
    lambda tensor: False,
    "batched gradients are refused for their tensors, not as batched",
)
_is_legacy_batched = _find(
    "_C._functorch.is_legacy_batchedtensor",
    lambda tensor: False,
    "batched gradients of is_grads_batched=True are refused for their tensors, not as batched",
)


def is_batched(tensor: Tensor) -> bool:
    """Whether vmap, or autograd's ``is_grads_batched=True``, made the tensor."""
    return bool(_is_batched(tensor) or _is_legacy_batched(tensor))


_counts_versions = _find(
    "Tensor._version", None, "changes in place between forward and backward are not noticed"
)


def version_counter(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for one made under inference mode, which
    counts no changes."""
    return 0 if _counts_versions is None or tensor.is_inference() else tensor._version


is_zero_tensor: Callable[[Tensor], bool] = _find(
    "Tensor._is_zerotensor",
    lambda tensor: False,
    "a zero tensor without memory is refused for its address",
)
"""Whether autograd made it as zeros without memory."""

is_functional: Callable[[Tensor], bool] = _find(
    "_is_functional_tensor",
    lambda tensor: False,
    "a functional tensor is refused for its address",
)
"""Whether functionalization wraps the tensor."""

_make_subclass = _find(
    "Tensor._make_subclass",
    lambda kind, tensor: tensor.as_subclass(kind),
    "mods are traced some microseconds slower",
)


def as_symbol_tensor(kind: type[Any], tensor: Tensor) -> Any:
    """Return `tensor` as an object of `kind`, a subclass of Tensor, without calling its
    ``__init__``."""
    return _make_subclass(kind, tensor)


without_modes: Callable[[], contextlib.AbstractContextManager[Any]] = _find(
    "utils._python_dispatch._disable_current_modes",
    contextlib.nullcontext,
    "anyflex can't be imported for the first time under a dispatch mode",
)
"""Context in which no dispatch mode is in force."""

_disable_dynamo = _find(
    "_compile._disable_dynamo",
    torch.compiler.disable,
    "`import anyflex` imports torch's compiler too, which takes seconds",
)


def kept_out_of_graphs(function: Function) -> Function:
    """Decorator: a compiled graph breaks where the function is called.

    ``torch.compiler.disable`` does the same, and imports the compiler for it.
    """
    kept: Function = _disable_dynamo(function)
    return kept


register_pytree_node: Callable[..., None] = _find(
    "utils._pytree.register_pytree_node",
    lambda *given, **named: None,
    "a block mask can't be an argument of an exported program",
)
GetAttrKey: Any = _find(
    "utils._pytree.GetAttrKey",
    str,
    "torch.export names a block mask's parts otherwise",
)
"""Key of a pytree's leaf that is an attribute."""

negated_view: Callable[[Tensor], Tensor] = _find(
    "_neg_view",
    torch.neg,
    "the conformance kit has no tensors with a negative bit",
)
"""View of the tensor with torch's negative bit set."""

_has_levels = _find(
    "autograd.forward_ad._current_level",
    None,
    "each eager call looks at its tensors for tangents; in compiled ones torch refuses them",
)


def in_dual_level() -> bool:
    """Whether a level of ``torch.autograd.forward_ad`` is known to be in force."""
    return _has_levels is not None and forward_ad._current_level != -1


dual_level: Callable[[ModuleType], int] = (
    (lambda module: 0) if _has_levels is None else attrgetter("_current_level")
)
"""Takes `torch.autograd.forward_ad`. Below 0 where no tensor can have a tangent; a function in C,
since each call asks."""


forward_mode_enabled: Callable[[], bool] = _find(
    "_C._is_fwd_grad_enabled",
    torch.is_grad_enabled,
    "a mod with no_grad runs through vmap, as one with a custom autograd.Function does",
)
"""Whether forward-mode derivatives are switched on, which custom Functions switch off."""

set_forward_mode: Callable[[bool], None] = _find(
    "_C._set_fwd_grad_enabled",
    lambda enabled: None,
    "a mod in a checkpoint is taken for one with a custom autograd.Function",
)

_base_apply = _find("_C._FunctionBase.apply", None, "gradients cost a microsecond a call more")


def apply_of(kind: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``kind.apply`` without its look for functorch transforms."""
    above: Any = super(torch.autograd.Function, kind)
    return kind.apply if _base_apply is None else above.apply


_schema = _find(
    "ops.aten.add_.Tensor._schema",
    None,
    "a custom operator in a mod is told to change its arguments by its name alone",
)


def is_mutable(operator: Any) -> bool:
    """Whether an operator (``torch.ops.aten.add_.Tensor``) writes to an argument, by its
    schema."""
    return _schema is not None and bool(operator._schema.is_mutable)


def dynamo_constant(function: Function) -> Function:
    """Decorator: Dynamo calls the function while it traces, and takes the result for a constant.

    ``torch.compiler.assume_constant_result`` sets the same mark, and imports the compiler for it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_BUNDLES = "torch.compiler.save_cache_artifacts() leaves anyflex's kernels out"
CacheArtifact: Any = _find("compiler._cache.CacheArtifact", None, _BUNDLES)
CacheArtifactFactory: Any = _find("compiler._cache.CacheArtifactFactory", None, _BUNDLES)
CacheArtifactManager: Any = _find("compiler._cache.CacheArtifactManager", None, _BUNDLES)
artifact_types: Any = _find("compiler._cache.CacheArtifactFactory._artifact_types", None, _BUNDLES)
"""Types of artifacts that torch's cache bundles may hold, by name."""


def break_graph(reason: str) -> None:
    """End the graph that Dynamo traces; under ``fullgraph=True`` it raises with the reason."""
    torch._dynamo.decorators.graph_break(reason)


_SYMBOLS = "some spellings of a mod's operations under torch.compile"
DYNAMO_NAMES: dict[str, tuple[str, str]] = {
    # path from torch._dynamo on -> (releases that have it, what is lost without it)
    "decorators.graph_break": (_ALL, "compiled autograd of mods that no graph can hold"),
    "exc.Unsupported": (_ALL, "anyflex's errors under torch.compile"),
    "exc.UncapturedHigherOrderOpError": (_ALL, "anyflex's errors under torch.compile"),
    "variables.ConstantVariable": (_ALL, _SYMBOLS),
    "variables.builtin.BuiltinVariable": (_ALL, _SYMBOLS),
    "variables.misc.AutogradFunctionVariable": (_ALL, _SYMBOLS),
    "variables.tensor.SymNodeVariable": (_ALL, _SYMBOLS),
    "variables.torch.TorchInGraphFunctionVariable": (_ALL, _SYMBOLS),
    "variables.torch_function.TorchFunctionModeVariable": (_ALL, _SYMBOLS),
    "variables.torch_function.dispatch_torch_function": (_ALL, _SYMBOLS),
    "variables.user_defined.UserDefinedObjectVariable": (_ALL, _SYMBOLS),
}
"""Names of torch's compiler, which are looked up while it traces a call of anyflex."""


@functools.cache
def dynamo_name(path: str) -> Any:
    """Return ``torch._dynamo.<path>``, one of `DYNAMO_NAMES`; imports the compiler.

    Raises:
        ImportError: this torch lacks it.
    """
    _, without = DYNAMO_NAMES[path]
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(f"torch._dynamo.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch {torch.__version__} has no torch._dynamo.{path}: {without}"
        ) from error
