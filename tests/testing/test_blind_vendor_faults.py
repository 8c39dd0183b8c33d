"""Each fault of `faults/blind_vendor.py` is caught by its case of the quick subset."""

from __future__ import annotations

from pathlib import Path

import pytest

from anyflex.testing.cases import every_case
from tests.testing.faults.blind_vendor import FAULTS
from tests.testing.faults.catching import check_caught, check_passes
from tests.testing.faults.fault import Fault


def test_every_fault_is_there() -> None:
    assert [fault.number for fault in FAULTS] == list(range(701, 716))
    assert all(every_case()[fault.case].quick for fault in FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.number}-{fault.case}")
def test_a_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    check_caught(fault, tmp_path)


def test_the_plugin_without_a_fault_passes_their_cases(tmp_path: Path) -> None:
    check_passes(FAULTS, tmp_path)
