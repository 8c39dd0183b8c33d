"""Compiled kernels: the decision that led to one, its description of a call, and its failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.decision import Accepted
from anyflex.contract.spec import Spec
from anyflex.errors import AllocationError, AnyflexError, PluginError
from anyflex.registry.cached_state import STATE

if TYPE_CHECKING:
    from anyflex.contract.call import Call
    from anyflex.registry.backend_choice import TraceLine

__all__ = [
    "CompiledKernel",
    "described",
    "kernel_failed",
    "launched",
    "no_memory",
    "summary",
]


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel with the decision that led to it.

    Args:
        backend: the backend object.
        kernel: what it compiled.
        spec: with this backend's own options filled in.
        decision: whether backward is the kernel's own or core's.
        distribution: ``"name version"`` of the backend's plugin.
        passed: candidates that were asked before it, and why each doesn't compute the call.
    """

    backend: Backend
    kernel: Kernel
    spec: Spec
    decision: Accepted
    distribution: str
    passed: tuple[TraceLine, ...] = ()


def kernel_failed(compiled: CompiledKernel, error: BaseException) -> AnyflexError:
    """Return the error to raise when a kernel raised `error`; its ``__cause__`` is set. An
    allocation that failed is no fault of the plugin.

    Don't pass anyflex's own errors or ``torch.OutOfMemoryError``.
    """
    from anyflex.registry.plugin_errors import first_line, plugin_error

    name = compiled.backend.name
    if isinstance(error, (RuntimeError, MemoryError)) and (failure := no_memory(compiled, error)):
        return failure
    others = "backend='reference'" if name != "reference" else "another backend"
    broken = plugin_error(
        name,
        compiled.distribution,
        f"is broken: its kernel for {summary(compiled.spec)} raised {first_line(error)}. Upgrade "
        f"{compiled.distribution.split(' ')[0]}, set ANYFLEX_DISABLE={name}, or force {others}",
    )
    broken.__cause__ = error
    return broken


def no_memory(
    compiled: CompiledKernel, error: RuntimeError | MemoryError
) -> AllocationError | None:
    """Return the error to raise where `error` is of an allocation that failed, else None; also for
    torch.OutOfMemoryError, which passes as it is."""
    from anyflex.tensors.allocation import failed_allocation

    name, work = compiled.backend.name, summary(compiled.spec)
    return failed_allocation(f"backend {name!r} ran out of memory computing {work}", error)


def described(compiled: CompiledKernel, call: Call) -> str:
    """Return the kernel's description of a call, or "" where its `describe` is broken: that is
    reported, and stops no call."""
    from anyflex.registry.plugin_errors import plugin_code, report

    plugin, distribution = compiled.backend.name, compiled.distribution
    try:
        with plugin_code(plugin, distribution, "describe(call)"):
            variant: object = compiled.kernel.describe(call)
            if not isinstance(variant, str):
                raise TypeError(f"it must return a str, got {variant!r}")
            return variant
    except PluginError as error:
        report(error, "what it computes is used")
        return ""


def launched(compiled: CompiledKernel, call: Call) -> None:
    """Tell the hook plugins of a launch. Call it where some implement ``anyflex_launched``."""
    hooks = STATE.hooks
    if hooks is not None:
        hooks.launched(compiled.spec, compiled.backend.name, described(compiled, call))


def summary(spec: Spec) -> str:
    """Return a spec's facts in half a line, for messages."""
    dtype = str(spec.dtype).removeprefix("torch.")
    mods = "".join(
        f", {name} mod"
        for name, graph in (("score", spec.score_graph), ("mask", spec.mask_graph))
        if graph is not None
    )
    gradients = f", gradients of {'/'.join(spec.gradients)}" if spec.gradients else ""
    return (
        f"{spec.device_type} {dtype} E={spec.head_dim} Ev={spec.value_head_dim} q {spec.q_class}"
        f"{mods}{gradients}"
    )
