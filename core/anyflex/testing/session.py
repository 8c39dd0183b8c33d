"""Session of one backend under inspection, which shares the registry with the reference alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from anyflex.errors import BackendRefused
from anyflex.plugin import Backend, Decision, Spec, hookimpl
from anyflex.registry import backend_table
from anyflex.registry.registered_backend import Entry
from anyflex.tensors import stand_in
from anyflex.testing.float32_precision import products_in
from anyflex.testing.inspector import Journal, ask, inspected
from anyflex.testing.stand_in_device import posing

__all__ = ["ConformanceFailure", "NotApplicable", "Session", "open_session"]


class ConformanceFailure(AssertionError):
    """A backend broke a promise; the message says which, and the actual result."""


class NotApplicable(Exception):
    """A case doesn't apply here; the message says why."""


@dataclass(frozen=True)
class Session:
    """Tools that a case works with.

    Args:
        name: of the backend, for ``backend=``.
        device: where tensors are.
        backend: the object under test; its answers go through the inspector.
        journal: the inspector's record.
        distribution: ``"name version"`` of what carries the backend.
        target: ``"module:Class"``, for other processes.
        installed: the backend came from an entry point.
        threads: how many threads torch's operations had before the session. In it they have one:
            most calls are tiny, and threads would only wait for each other.
    """

    name: str
    device: torch.device
    backend: Backend
    journal: Journal
    distribution: str = ""
    target: str = ""
    installed: bool = False
    threads: int = 1

    @property
    def device_type(self) -> str:
        """Device type in a spec of a call on the session's tensors."""
        posed = stand_in.posed_as(self.device)
        return self.device.type if posed is None else posed[0]

    def require(self, holds: bool, otherwise: str) -> None:
        """Fail the case unless a condition holds."""
        if not holds:
            raise ConformanceFailure(otherwise)

    def needs(self, holds: object, otherwise: str) -> None:
        """Skip the case unless a condition holds."""
        if not holds:
            raise NotApplicable(otherwise)

    def check_journal(self) -> None:
        """Fail the case if the inspector saw a broken promise."""
        for name, _ in self.journal.launches:
            if name != self.name:
                self.journal.note(f"a call that forces {self.name!r} was computed by {name!r} too")
        if self.journal.violations:
            raise ConformanceFailure("; ".join(self.journal.violations))

    def unwatched(self) -> AbstractContextManager[None]:
        """Let kernels run unchecked in the body, with their own speed and asynchrony."""
        return self.inspecting("watching", False)

    @contextmanager
    def inspecting(self, name: str, value: object) -> Iterator[None]:
        """Set an attribute of the journal in the body."""
        before = getattr(self.journal, name)
        setattr(self.journal, name, value)
        try:
            yield
        finally:
            setattr(self.journal, name, before)

    def ask(self, spec: Spec) -> Decision:
        """Ask the backend whether it takes a spec, under inspection."""
        return ask(self.backend, spec, self.journal)


class _Listener:
    """A hook plugin that notes the launches."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    @hookimpl
    def anyflex_launched(self, backend: str, variant: str) -> None:
        with self._journal.lock:
            self._journal.launches.append((backend, variant))


@contextmanager
def open_session(
    name: str,
    device: torch.device | str | None = None,
    *,
    backend_class: type[Backend] | None = None,
) -> Iterator[Session]:
    """Put a registered backend under inspection.

    In the body the registry holds the inspected backend and the reference only.

    Args:
        name: a registered name, ``"reference"`` included.
        device: where tensors shall be; None for the name's device type (the CPU for the
            reference, and where CPU tensors pose as that type). With ``"cpu"`` for a backend of
            another device type, CPU tensors pose as that (`anyflex.testing.posing`).
        backend_class: the class for `name`, in place of the registered one.

    Raises:
        BackendRefused: there is no such backend, or its probe refuses this machine.
        PluginError: it is broken.
    """
    if backend_class is not None:
        with backend_table.isolated():
            backend_table.register(name, backend_class)
            with open_session(name, device) as session:
                yield session
        return
    entry = backend_table.current().get(name)
    if entry is None:
        known = ", ".join(backend_table.current().names())
        raise BackendRefused(f"there is no backend {name!r}; registered are: {known}")
    if _to_be_posed(entry, device):
        with posing(entry.device_type), open_session(name, device) as session:
            yield session
        return
    backend = _usable(entry)
    journal = Journal()
    watched = inspected(backend, journal)
    isolation = (
        backend_table.isolated(reference=watched)
        if name == backend_table.REFERENCE
        else backend_table.isolated()
    )
    with isolation, products_in("highest"):
        if name != backend_table.REFERENCE:
            backend_table.register(name, watched)
        backend_table.register_hooks(_Listener(journal), "conformance")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield Session(
                name,
                _device(entry) if device is None else torch.device(device),
                backend,
                journal,
                entry.distribution,
                entry.value,
                not entry.in_process,
                threads,
            )
        finally:
            torch.set_num_threads(threads)


def _to_be_posed(entry: Entry, device: torch.device | str | None) -> bool:
    return (
        device is not None
        and torch.device(device).type == "cpu"
        and entry.device_type not in ("cpu", "*")
        and stand_in.posed_in_force() is None
    )


def _usable(entry: Entry) -> Backend:
    state = entry.state()
    if state.error is not None:
        raise state.error
    # A probe doesn't find a device that is only posed, so its rejection is ignored.
    posed = stand_in.stands_in_for(entry.device_type)
    usable = state.kind == "usable" or (state.kind == "rejected" and posed)
    if state.backend is None or not usable:
        raise BackendRefused(f"backend {entry.name!r} can't be used here: {state.reason}")
    return state.backend


def _device(entry: Entry) -> torch.device:
    if entry.device_type == "*" or stand_in.stands_in_for(entry.device_type):
        return torch.device("cpu")
    return torch.device(entry.device_type)
