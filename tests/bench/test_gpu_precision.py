"""`bench/gpu_precision.py`, without a GPU: its calls, its comparison, its verdict."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from anyflex.bench.case import make_inputs
from anyflex.bench.check import Formula
from tests.soak import only_in_soak

__all__: list[str] = []

PROGRAM = Path(__file__).parents[2] / "bench" / "gpu_precision.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def precision() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_precision", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_precision"] = module
    spec.loader.exec_module(module)
    return module


def test_calls_are_the_same_each_time_and_can_be_made(precision: ModuleType) -> None:
    calls = [precision.call_of(number) for number in range(60)]
    assert calls == [precision.call_of(number) for number in range(60)]
    assert {call.dtype for call in calls} == {"bfloat16", "float16", "float32"}
    assert {(call.masks, call.mods) for call in calls} >= {((), ()), (("causal",), ("alibi",))}
    assert any(call.q_shape[2] % 128 for call in calls)
    for masks in precision.MASKS:
        for mods in precision.MODS:
            case = precision._case("", (1, 2, 1), 300, (16, 16), "float32", masks, mods)
            make_inputs(case, CPU)


def test_errors_are_of_the_same_inputs_and_the_rest_says_why(precision: ModuleType) -> None:
    case = precision._case("plain", (1, 2, 1), 130, (32, 32), "float32", (), ())
    names = ("reference", "torch.sdpa.flash", "torch.flex")
    assert Formula(case, CPU).inputs.case == case  # not a shorter one
    row = precision.row_of(7, case, names, CPU)
    assert set(row.errors) == {"reference", "torch.sdpa.flash"}
    assert all(1e-9 < error < 1e-6 for error in row.errors.values())
    assert set(row.refused) == {"torch.flex"} and not row.failed
    assert not precision.faults([row], ["reference"])


@pytest.mark.parametrize(
    ("errors", "failed", "told"),
    [
        ({"cuda": 1.19e-3, "torch.flex": 1e-3}, {}, None),
        ({"cuda": 1.21e-3, "torch.flex": 1e-3}, {}, "cuda is off by 0.00121, a peer by 0.001"),
        ({"cuda": 1.21e-3, "torch.flex": 3e-3, "x": 1e-3}, {}, "a peer by 0.001"),
        ({"cuda": float("nan"), "torch.flex": 1e-3}, {}, "cuda is off by nan"),
        ({"cuda": 1e-3, "cuda.triton": 2e-3, "torch.flex": 1e-3}, {}, "cuda.triton is off"),
        ({"torch.flex": 1e-3}, {"cuda": "RuntimeError: no"}, "cuda failed: RuntimeError: no"),
        ({"cuda": 1e-3}, {}, "a peer computes 0 of 1 calls"),
    ],
)
def test_the_verdict(
    precision: ModuleType, errors: dict[str, float], failed: dict[str, str], told: str | None
) -> None:
    row = precision.Row(0, "a call", errors, {}, failed)
    found = precision.faults([row], ["cuda", "cuda.triton"])
    assert found == [] if told is None else told in "\n".join(found)


@only_in_soak("it compiles torch's kernel for a CPU")
def test_what_it_prints_and_its_exit_status(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            sys.executable, str(PROGRAM), "--device", "cpu", "--backend", "reference,torch.flex",
            "--count", "1", "--no-long-rows", "--jobs", "1", "--json", str(report),
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a peer computes 0 of 1 calls, fewer than half" in done.stdout
    assert '"number": 0' in report.read_text()
