"""State of the process that calls leave changed is seen after other calls have changed it, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from anyflex.testing.cases import every_case
from anyflex.testing.runner import run_case
from anyflex.testing.session import open_session
from tests.testing.faults.fault import Change, example

__all__: list[str] = []

_FORWARD = "    def forward(self, call: Call, out: Outputs) -> None:\n"


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ("torch.manual_seed(0)", "the random number generator's state"),
        ("torch.set_float32_matmul_precision('medium')", "the precision of float32 products"),
        ("__import__('warnings').simplefilter('ignore')", "the filters of warnings"),
    ],
)
def test_what_each_call_sets_to_the_same_is_a_change(left: str, said: str, tmp_path: Path) -> None:
    change = Change("kernel.py", _FORWARD, f"{_FORWARD}        {left}\n")
    case = every_case()["state/global_state"]
    precision = torch.get_float32_matmul_precision()
    try:
        with (
            example(tmp_path, (change,)) as backend,
            open_session("cpu.example", backend_class=backend) as session,
        ):
            outcomes = [run_case(session, case) for _ in range(2)]
    finally:
        torch.set_float32_matmul_precision(precision)
    for outcome in outcomes:
        assert outcome.status == "failed" and said in outcome.detail


def test_the_case_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(7)
    with example(tmp_path) as backend:
        before = torch.get_rng_state()
        with open_session("cpu.example", backend_class=backend) as session:
            outcome = run_case(session, every_case()["state/global_state"])
        assert outcome.status == "passed", outcome
        assert torch.equal(torch.get_rng_state(), before)
