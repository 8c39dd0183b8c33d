"""The backend that takes a plain call: what is asked about a call while it has no spec yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anyflex.registry.cached_state import STATE
from anyflex.registry.forced_backends import names_in_force
from anyflex.tensors.stand_in import posed_as
from anyflex.tensors.tensor_facts import architecture, fp32_precision
from anyflex.tensors.torch_versions import dynamo_constant

if TYPE_CHECKING:
    from anyflex.contract.backend import Backend
    from anyflex.contract.decision import Accepted
    from anyflex.registry.registered_backend import Entry

__all__ = ["plain_backend", "takes"]


def plain_backend(
    device: torch.device, dtype: torch.dtype, backend: str | None, learns: bool
) -> tuple[Entry, Backend, Accepted] | None:
    """Return the backend that takes a plain call, and its decision.

    Args:
        device, dtype: of query.
        backend: the ``backend=`` argument, or None.
        learns: the call needs gradients.

    Returns:
        None where nobody takes it, or asking failed: the call itself raises, with its own spec.
    """
    from anyflex.contract.spec import Spec
    from anyflex.errors import AnyflexError
    from anyflex.registry.backend_choice import Choice

    try:
        device_type, arch = posed_as(device) or (device.type, architecture(device))
    except (RuntimeError, AssertionError):  # torch's errors for a device that isn't here
        return None  # fake tensors may be on one
    plain = Spec(
        device_type,
        arch,
        dtype,
        64,
        64,
        needs_lse=learns,
        gradients=("q", "k", "v") if learns else (),
        fp32_precision=fp32_precision(dtype, device_type),
    )
    try:
        choice = Choice(plain, names_in_force(backend), backend, ())
        for entry in choice.candidates:
            answer = choice.ask(entry)
            if answer.decision is not None and answer.state.backend is not None:
                return entry, answer.state.backend, answer.decision
    except (AnyflexError, torch.OutOfMemoryError):
        pass
    return None


_takes: dict[tuple[object, ...], bool] = {}


# Compiled programs keep the result. A stale one changes who does the work, not the results.
@dynamo_constant
def takes(
    field: str, device: torch.device, dtype: torch.dtype, backend: str | None, learns: bool
) -> bool:
    """Whether a call's backend knows a field of specs, to judge by who takes a plain call.

    Args:
        field: ``"sinks"`` or ``"q_layout"``.
        device, dtype, backend, learns: as for `plain_backend`.
    """
    asked = field, device, dtype, backend, learns
    key = *asked, names_in_force(backend), posed_as(device), STATE.generation
    known = _takes.get(key)
    if known is None:
        taker = plain_backend(device, dtype, backend, learns)
        if taker is None:  # maybe only now, for lack of memory
            return False
        if len(_takes) >= 64:
            _takes.clear()
        known = field in taker[1].capabilities.known_fields
        _takes[key] = known
    return known
