"""Test of a fault: one case on the changed plugin, and the same on the right one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from anyflex.testing.cases import every_case
from anyflex.testing.runner import run_case
from anyflex.testing.session import open_session
from tests.testing.faults.fault import Fault, example

__all__ = ["check_caught", "check_passes"]


def check_caught(fault: Fault, folder: Path) -> None:
    """Check that the fault's case fails on the changed plugin, for the reason named."""
    with (
        example(folder, fault.changes) as backend,
        open_session("cpu.example", backend_class=backend) as session,
    ):
        outcome = run_case(session, every_case()[fault.case])
    assert outcome.status == "failed", fault.what
    assert fault.says in outcome.detail


def check_passes(faults: Iterable[Fault], folder: Path) -> None:
    """Check that the plugin without a fault passes every case that catches these."""
    with (
        example(folder) as backend,
        open_session("cpu.example", backend_class=backend) as session,
    ):
        for name in sorted({fault.case for fault in faults}):
            outcome = run_case(session, every_case()[name])
            assert outcome.status == "passed", outcome
