"""Each numerical fault is caught by its case of the quick subset, for the reason it names.

What a fault `says` is a regular expression here. `make soak` runs all quick cases
of these groups on each fault and prints how many fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from anyflex.testing.case_types import Case
from anyflex.testing.cases import (
    aux_outputs,
    decoding,
    gradients,
    inputs,
    layouts,
    masks,
    mods,
    operations,
    precision,
    required,
    shapes,
    sinks,
    structure,
)
from anyflex.testing.runner import Outcome, run_case, run_cases
from anyflex.testing.session import open_session
from tests.soak import SOAK
from tests.testing.faults import forward
from tests.testing.faults import gradients as gradient_faults
from tests.testing.faults import masks as mask_faults
from tests.testing.faults import precision as precision_faults
from tests.testing.faults import shapes as shape_faults
from tests.testing.faults import sinks as sink_faults
from tests.testing.faults.fault import Fault, example

GROUPS = (
    required,
    mods,
    operations,
    masks,
    structure,
    shapes,
    layouts,
    decoding,
    aux_outputs,
    gradients,
    precision,
    inputs,
    sinks,
)
QUICK: dict[str, Case] = {
    name: case for group in GROUPS for name, case in group.CASES.items() if case.quick
}
FAULTS = (
    *forward.FAULTS,
    *mask_faults.FAULTS,
    *shape_faults.FAULTS,
    *gradient_faults.FAULTS,
    *precision_faults.FAULTS,
    *sink_faults.FAULTS,
)
TRIED = FAULTS[:: 1 if SOAK else 3]


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFLEX_CACHE_DIR", str(tmp_path / "cache"))


def failures(outcomes: Iterable[Outcome]) -> list[str]:
    return [f"{outcome.case}: {outcome.detail}" for outcome in outcomes if not outcome.good]


def test_every_fault_of_the_list_is_there() -> None:
    assert [fault.number for fault in FAULTS] == [*range(1, 79), *range(801, 806)]


def test_the_plugin_without_a_fault_passes_the_cases(tmp_path: Path) -> None:
    chosen = [*QUICK.values()] if SOAK else [QUICK[name] for name in {f.case for f in TRIED}]
    with (
        example(tmp_path) as backend,
        open_session("cpu.example", backend_class=backend) as session,
    ):
        assert failures(run_cases(session, chosen, require=frozenset({"all"}))) == []


@pytest.mark.parametrize("fault", TRIED, ids=lambda fault: f"{fault.number}-{fault.case}")
def test_a_fault_is_caught(fault: Fault, tmp_path: Path) -> None:
    with (
        example(tmp_path, fault.changes) as backend,
        open_session("cpu.example", backend_class=backend) as session,
    ):
        outcome = run_case(session, QUICK[fault.case])
        caught = outcome.status == "failed" and re.search(fault.says, outcome.detail)
        how = "caught by" if caught else "NOT caught by"
        print(f"fault {fault.number:3d}, {fault.what}: {how} {fault.case}")
        assert caught, f"{outcome.status}: {outcome.detail}"
        if SOAK:
            failed = failures(run_cases(session, QUICK.values()))
            print(f"fault {fault.number:3d}: {len(failed)} of {len(QUICK)} quick cases fail")
