"""Warnings and errors of a call that another backend computes than the one that should have."""

from __future__ import annotations

import logging
import warnings

from anyflex.errors import BackendRefused, PerformanceWarning
from anyflex.process.user_frames import user_stacklevel
from anyflex.registry import cached_state, environment
from anyflex.registry.backend_choice import Answer, Choice, TraceLine
from anyflex.registry.backend_table import REFERENCE

__all__ = [
    "forget_warnings",
    "warn_about_determinism",
    "warn_about_fallback",
    "warn_about_opaque_mod",
    "warn_about_unused_options",
    "warn_once",
]

_log = logging.getLogger("anyflex")
_warned: set[str] = set()


def warn_about_fallback(choice: Choice, trace: list[TraceLine], chosen: str) -> None:
    """Warn that installed backends were passed over, or that an accelerator's call is computed on
    the reference. A forced choice is no fallback.

    Raises:
        BackendRefused: under ANYFLEX_FALLBACK=error.
    """
    if choice.forced_by:
        return
    passed = [line for line in trace if line.backend not in (REFERENCE, chosen)]
    messages = [
        f"backend {line.backend} ({line.distribution}) is passed over, {chosen} computes the "
        f"call: {line.reason}"
        for line in passed
    ]
    if chosen == REFERENCE and not passed:
        messages += _on_reference(choice)
    if messages:
        _tell(
            messages,
            {line.backend: line.reason for line in passed}
            or {choice.spec.device_type: messages[0]},
        )


def warn_about_opaque_mod(mod: str, reason: str) -> None:
    """Warn once that a mod without a graph runs on the reference, through vmap.

    Raises:
        BackendRefused: under ANYFLEX_FALLBACK=error.
    """
    message = f"{mod} runs on the reference backend, through vmap: {reason}"
    _tell([message], {REFERENCE: message})


def _tell(messages: list[str], reasons: dict[str, str]) -> None:
    """Do with these messages what ANYFLEX_FALLBACK says."""
    mode = environment.fallback()
    if mode == "error":
        raise BackendRefused(f"ANYFLEX_FALLBACK=error: {'; '.join(messages)}", reasons)
    for message in messages:
        if mode == "warn":
            warn_once(message)
        else:
            _log.debug("%s", message)


def _on_reference(choice: Choice) -> list[str]:
    device = choice.spec.device_type
    missing = choice.missing()
    if choice.spec.opaque:  # reported when the mod was traced: see warn_about_opaque_mod
        return []
    if device != "cpu":
        if missing is not None:
            why = missing.reason
        else:
            entries = choice.table.of_device(device)
            why = "; ".join(f"{entry.name}: {entry.state().reason}" for entry in entries)
        return [
            f"no backend for {device} can be used, so the reference computes the call, slowly; "
            f"{why}"
        ]
    if missing is not None:
        _log.debug("the reference computes on the cpu; %s", missing.reason)
    return []


def warn_about_unused_options(answer: Answer) -> None:
    """Warn once for each of torch's tuning keys that the chosen backend doesn't use."""
    for key in answer.resolved.ignored_tuning if answer.resolved is not None else ():
        warn_once(
            f"kernel_options[{key!r}] has no meaning for backend {answer.line.backend} and is "
            "ignored: it tunes torch's kernels"
        )


def warn_about_determinism(answer: Answer) -> None:
    """Warn once, under torch's warn_only mode, that gradients may differ in their last bits."""
    backend, decision = answer.state.backend, answer.decision
    if backend is None or decision is None or decision.backward == "core":
        return
    if answer.spec.determinism != "warn" or not answer.spec.needs_backward:
        return
    if not backend.capabilities.deterministic:
        warn_once(
            f"backend {answer.line.backend} has no gradients that repeat bit for bit, and "
            "torch.use_deterministic_algorithms(True, warn_only=True) asks for them",
            UserWarning,
        )


def warn_once(message: str, category: type[Warning] = PerformanceWarning) -> None:
    """Issue a warning that this process has not issued yet."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, category, stacklevel=user_stacklevel())


forget_warnings = _warned.clear
"""Forgets which warnings were issued: for tests."""

cached_state.on_replaced(forget_warnings)
