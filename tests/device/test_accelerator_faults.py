"""Faults that need an accelerator, on one: the kit's cases of streams catch them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anyflex.testing.cases import every_case
from anyflex.testing.runner import run_case
from anyflex.testing.session import open_session
from tests.testing.faults.accelerator import FAULTS
from tests.testing.faults.fault import Fault, example

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device on this machine"
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.number}-{fault.case}")
def test_a_fault_of_streams_is_caught(fault: Fault, tmp_path: Path) -> None:
    with (
        example(tmp_path, fault.changes) as backend,
        open_session("cuda.example", backend_class=backend) as session,
    ):
        outcome = run_case(session, every_case()[fault.case])
    assert outcome.status == "failed", fault.what
    assert fault.says in outcome.detail


def test_an_example_that_does_not_wait_passes_their_cases(tmp_path: Path) -> None:
    with (
        example(tmp_path, ()) as backend,
        open_session("cuda.example", backend_class=backend) as session,
    ):
        for name in sorted({fault.case for fault in FAULTS}):
            outcome = run_case(session, every_case()[name])
            assert outcome.status == "passed", outcome.detail
