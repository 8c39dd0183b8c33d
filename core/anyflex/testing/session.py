"""A session: one backend under inspection, alone in the registry but for the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from anyflex.errors import BackendRefused
from anyflex.plugin import Backend
from anyflex.registry import table
from anyflex.testing.inspector import Journal, inspected

__all__ = ["ConformanceFailure", "Session", "open_session"]


class ConformanceFailure(AssertionError):
    """A backend broke a promise; the message says which, and what came instead."""


@dataclass(frozen=True)
class Session:
    """What a case works with.

    Args:
        name: of the backend, for ``backend=``.
        device: where tensors are.
        backend: the object under test; its answers go through the inspector.
        journal: what the inspector sees.
    """

    name: str
    device: torch.device
    backend: Backend
    journal: Journal

    def require(self, holds: bool, otherwise: str) -> None:
        """Fail the case unless a condition holds."""
        if not holds:
            raise ConformanceFailure(otherwise)

    def check_journal(self) -> None:
        """Fail the case if the inspector saw a broken promise."""
        if self.journal.violations:
            raise ConformanceFailure("; ".join(self.journal.violations))


@contextmanager
def open_session(name: str, device: torch.device | str | None = None) -> Iterator[Session]:
    """Put a registered backend under inspection.

    In the body the registry holds the inspected backend and the reference only.

    Args:
        name: a registered name, ``"reference"`` included.
        device: where tensors shall be; None for the name's device type (the CPU for the
            reference).

    Raises:
        BackendRefused: there is no such backend, or its probe refuses this machine.
        PluginError: it is broken.
    """
    entry = table.current().get(name)
    if entry is None:
        known = ", ".join(table.current().names())
        raise BackendRefused(f"there is no backend {name!r}; registered are: {known}")
    state = entry.state()
    if state.error is not None:
        raise state.error
    if state.backend is None or state.kind != "usable":
        raise BackendRefused(f"backend {name!r} can't be used here: {state.reason}")
    backend = state.backend
    if device is None:
        device = "cpu" if entry.device_type == "*" else entry.device_type
    journal = Journal()
    watched = inspected(backend, journal)
    with table.isolated(reference=watched) if name == table.REFERENCE else table.isolated():
        if name != table.REFERENCE:
            table.register(name, watched)
        yield Session(name, torch.device(device), backend, journal)
