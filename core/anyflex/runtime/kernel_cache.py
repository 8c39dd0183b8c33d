"""Cache of compiled kernels by spec: asks the registry, compiles, keeps the kernel.

It isn't on the hot path: a call with a known plan doesn't come here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyflex.contract.spec import Spec
from anyflex.process.lru import Recent
from anyflex.registry import cached_state
from anyflex.registry.cached_state import STATE
from anyflex.runtime.compiled_kernel import CompiledKernel

if TYPE_CHECKING:
    from anyflex.registry.freeze_options import KernelOptions

__all__ = [
    "forget",
    "kernel_for",
]

DECISIONS = 4096
"""Maximum number of decisions (spec, forced names, options) that are kept."""


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
    # Options by repr: 1, 1.0 and True are equal, but not the same option value.
    key = (STATE.generation, spec, names, explicit, repr(kernel_options), posed)
    compiled = _decisions.get(key)
    if compiled is None:
        # Loaded here: `import anyflex` must stay cheap.
        from anyflex.runtime.kernel_compiler import decide

        compiled = decide(spec, names, explicit, kernel_options, posed)
        _decisions.put(key, compiled)
    return compiled


def forget() -> None:
    """Drop kernels and decisions; those in use stay valid."""
    global _decisions
    _decisions = Recent(DECISIONS)


cached_state.on_replaced(forget)
