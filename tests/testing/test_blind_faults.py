"""Each fault of the lists that were written without a look at the kit's cases is caught by its
case of the quick subset."""

from __future__ import annotations

from pathlib import Path

import pytest

from anyflex.testing.cases import every_case
from tests.soak import SOAK
from tests.testing.faults import (
    blind_contract,
    blind_later_reports,
    blind_reports,
    blind_source,
    blind_vendor,
)
from tests.testing.faults.catching import check_caught, check_passes
from tests.testing.faults.fault import Fault

LISTS = {
    range(201, 215): blind_contract.FAULTS,
    range(501, 513): blind_later_reports.FAULTS,
    range(401, 413): blind_reports.FAULTS,
    range(301, 325): blind_source.FAULTS,
    range(701, 716): blind_vendor.FAULTS,
}
"""Faults by their numbers."""
STEP = slice(None, None, 1 if SOAK else 3)
"""The faults of each list that are tried."""


@pytest.mark.parametrize("numbers", LISTS, ids=str)
def test_every_fault_is_there(numbers: range) -> None:
    assert [fault.number for fault in LISTS[numbers]] == list(numbers)
    assert all(every_case()[fault.case].quick for fault in LISTS[numbers])


@pytest.mark.parametrize(
    "fault",
    [fault for faults in LISTS.values() for fault in faults[STEP]],
    ids=lambda fault: f"{fault.number}-{fault.case}",
)
def test_a_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    check_caught(fault, tmp_path)


@pytest.mark.parametrize("numbers", LISTS, ids=str)
def test_the_plugin_without_a_fault_passes_their_cases(numbers: range, tmp_path: Path) -> None:
    check_passes(LISTS[numbers][STEP], tmp_path)
