"""From a spec to a compiled kernel: asks the registry, compiles, keeps what is compiled.

Nothing of this is on the hot path: a call whose plan is known doesn't come here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.decision import Accepted
from anyflex.contract.spec import Spec
from anyflex.errors import AnyflexError, PluginError
from anyflex.process.lru import Recent
from anyflex.registry.cached_state import generation, hooks_in_force

if TYPE_CHECKING:
    from anyflex.contract.call import Call
    from anyflex.registry.backend_choice import Selection, TraceLine
    from anyflex.registry.freeze_options import KernelOptions

__all__ = [
    "CompiledKernel",
    "described",
    "explain_selection",
    "forget",
    "kernel_failed",
    "kernel_for",
    "launched",
    "listeners",
]

DECISIONS = 4096
"""How many decisions (spec, forced names, options) are kept."""


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel with what led to it.

    Args:
        backend: the backend object.
        kernel: what it compiled.
        spec: with this backend's own options filled in.
        decision: whether backward is the kernel's own or core's.
        distribution: ``"name version"`` of the backend's plugin.
        trace: what the candidates answered, the chosen one last.
    """

    backend: Backend
    kernel: Kernel
    spec: Spec
    decision: Accepted
    distribution: str
    trace: tuple[TraceLine, ...]


_decisions: Recent[object, CompiledKernel] = Recent(DECISIONS)


def kernel_for(
    spec: Spec,
    names: tuple[str, ...],
    explicit: str | None,
    kernel_options: KernelOptions,
    *,
    posed: bool = False,
) -> CompiledKernel:
    """Return the kernel for a spec: the registry decides, the backend compiles, once.

    Args:
        spec: without options.
        names: from `anyflex.registry.names_in_force`.
        explicit: the argument ``backend=``, or None.
        kernel_options: from `anyflex.registry.freeze_options.freeze_options`.
        posed: CPU tensors stand in for the spec's device
            (`anyflex.registry.backend_choice.Choice`).

    Raises:
        ArgumentError, ArgumentTypeError: an unknown backend name, or wrong ``kernel_options``.
        BackendRefused: the forced backend, or everybody, refuses.
        PluginError: the forced backend is broken.
        GraphCaptureError: the kernel would have to be compiled inside a graph capture.
    """
    # As text: of 1, 1.0 and True, which are equal, an option may take only one.
    key = (generation(), spec, names, explicit, repr(kernel_options), posed)
    compiled = _decisions.get(key)
    if compiled is None:
        # Loaded here: `import anyflex` must stay cheap.
        from anyflex.runtime.kernel_compiler import decide

        compiled = decide(spec, names, explicit, kernel_options, posed)
        _decisions.put(key, compiled)
    return compiled


def explain_selection(
    spec: Spec,
    names: tuple[str, ...],
    explicit: str | None,
    kernel_options: KernelOptions,
    *,
    posed: bool = False,
) -> Selection:
    """Return what `kernel_for` would choose and why, without compiling. See
    `anyflex.registry.backend_choice.explain_selection`."""
    from anyflex.registry.backend_choice import explain_selection

    return explain_selection(spec, names, explicit, kernel_options, posed=posed)


def kernel_failed(compiled: CompiledKernel, error: BaseException) -> AnyflexError:
    """Return the error to raise when a kernel raised `error`; its ``__cause__`` is set. An
    allocation that failed is no fault of the plugin.

    anyflex's own errors and ``torch.OutOfMemoryError`` should not be brought here.
    """
    from anyflex.registry.plugin_errors import first_line
    from anyflex.runtime.kernel_compiler import summary

    name = compiled.backend.name
    if isinstance(error, (RuntimeError, MemoryError)):
        from anyflex.tensors.allocation import failed_allocation

        doing = f"backend {name!r} ran out of memory computing {summary(compiled.spec)}"
        if failure := failed_allocation(doing, error):
            return failure
    others = "backend='reference'" if name != "reference" else "another backend"
    broken = PluginError(
        f"plugin {name!r} of {compiled.distribution} is broken: its kernel for "
        f"{summary(compiled.spec)} raised {first_line(error)}. Upgrade "
        f"{compiled.distribution.split(' ')[0]}, set ANYFLEX_DISABLE={name}, or force {others}",
        plugin=name,
        distribution=compiled.distribution,
    )
    broken.__cause__ = error
    return broken


def described(compiled: CompiledKernel, call: Call) -> str:
    """Return what the kernel says of a call, or "" where its `describe` is broken: that is
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


def listeners() -> bool:
    """Whether some hook plugin implements ``anyflex_launched``. On the hot path."""
    hooks = hooks_in_force()
    return hooks is not None and hooks.listening


def launched(spec: Spec, backend: Backend, variant: str) -> None:
    """Tell the hook plugins of a launch. To be called only where `listeners` says so."""
    hooks = hooks_in_force()
    if hooks is not None:
        hooks.launched(spec, backend.name, variant)


def forget() -> None:
    """Drop kernels and decisions; those in use stay valid."""
    global _decisions
    _decisions = Recent(DECISIONS)
    compiling = sys.modules.get("anyflex.runtime.kernel_compiler")
    if compiling is not None:
        compiling.forget()
