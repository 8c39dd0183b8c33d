"""Each fault of caches, concurrency and contracts, and each that a new backend got past the kit,
is caught by its case of the quick subset."""

from __future__ import annotations

from pathlib import Path

import pytest

from anyflex.testing import child_process
from anyflex.testing.cases import every_case
from tests.soak import SOAK
from tests.testing.faults import caches, contracts, missed, state
from tests.testing.faults.catching import check_caught, check_passes
from tests.testing.faults.fault import Fault

LISTED = (*caches.FAULTS, *contracts.FAULTS)
FAULTS = (*LISTED, *state.FAULTS, *missed.FAULTS)
TRIED = FAULTS[:: 1 if SOAK else 4]


def test_every_fault_of_the_list_is_there() -> None:
    assert [fault.number for fault in LISTED] == list(range(79, 109))
    assert [fault.number for fault in missed.FAULTS] == list(range(601, 608))
    assert all(every_case()[fault.case].quick for fault in FAULTS)


@pytest.mark.parametrize("fault", TRIED, ids=lambda fault: f"{fault.number}-{fault.case}")
def test_a_fault_is_caught(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "FORK_SECONDS", 3.0)
    check_caught(fault, tmp_path)


def test_the_plugin_without_a_fault_passes_their_cases(tmp_path: Path) -> None:
    check_passes(TRIED, tmp_path)
