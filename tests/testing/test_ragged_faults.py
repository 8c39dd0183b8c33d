"""Each fault of packed sequences and pages is caught by its case of the quick subset."""

from __future__ import annotations

from pathlib import Path

import pytest

from anyflex.testing.cases import every_case
from anyflex.testing.runner import Outcome, run_case
from anyflex.testing.session import open_session
from tests.soak import SOAK
from tests.testing.faults.fault import Change, Fault
from tests.testing.faults.packed_path import packed_path
from tests.testing.faults.ragged import FAULTS, OWN

__all__: list[str] = []

STEP = slice(None, None, 1 if SOAK else 3)
"""The faults of each list that are tried."""


def outcomes(
    folder: Path, names: list[str], changes: tuple[Change, ...] = (), *, own: bool
) -> list[Outcome]:
    with (
        packed_path(folder, changes, own=own) as backend,
        open_session("cpu.packed", backend_class=backend) as session,
    ):
        return [run_case(session, every_case()[name]) for name in names]


def test_every_fault_of_the_list_is_there() -> None:
    listed = [*FAULTS, *OWN]
    assert [fault.number for fault in listed] == list(range(701, 730))
    assert all(every_case()[fault.case].quick for fault in listed)


@pytest.mark.parametrize("fault", [*FAULTS[STEP], *OWN[STEP]], ids=lambda f: f"{f.number}")
def test_a_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    (outcome,) = outcomes(tmp_path, [fault.case], fault.changes, own=fault in OWN)
    assert outcome.status == "failed", fault.what
    assert fault.says in outcome.detail


@pytest.mark.parametrize("own", [False, True])
def test_without_a_fault_the_cases_pass(own: bool, tmp_path: Path) -> None:
    names = sorted({fault.case for fault in (OWN if own else FAULTS)[STEP]})
    for outcome in outcomes(tmp_path, names, own=own):
        assert outcome.status == "passed", outcome
