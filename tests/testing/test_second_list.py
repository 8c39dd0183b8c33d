"""Each fault of the second list is caught by its case of the quick subset."""

from __future__ import annotations

from pathlib import Path

import pytest

from anyflex.testing.cases import every_case
from anyflex.testing.runner import run_case
from anyflex.testing.session import open_session
from tests.testing.faults.fault import Fault, example
from tests.testing.faults.second_list import FAULTS


def test_every_fault_of_the_second_list_is_there() -> None:
    assert [fault.number for fault in FAULTS] == list(range(201, 215))
    assert all(every_case()[fault.case].quick for fault in FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.number}-{fault.case}")
def test_a_fault_of_the_second_list_is_caught(fault: Fault, tmp_path: Path) -> None:
    with (
        example(tmp_path, fault.changes) as backend,
        open_session("cpu.example", backend_class=backend) as session,
    ):
        outcome = run_case(session, every_case()[fault.case])
    assert outcome.status == "failed", fault.what
    assert fault.says in outcome.detail


def test_the_plugin_without_a_fault_passes_the_cases_of_the_second_list(tmp_path: Path) -> None:
    with (
        example(tmp_path) as backend,
        open_session("cpu.example", backend_class=backend) as session,
    ):
        for name in sorted({fault.case for fault in FAULTS}):
            outcome = run_case(session, every_case()[name])
            assert outcome.status == "passed", outcome
