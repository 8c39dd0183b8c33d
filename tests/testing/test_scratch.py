"""A result that depends on what its kernel's workspace held before is caught."""

from __future__ import annotations

from pathlib import Path

from tests.testing.faults.catching import check_caught, check_passes
from tests.testing.faults.fault import Change, Fault

_UNROUNDED_WHERE_ZERO = Fault(
    0,
    "sums of dk and dv begin at what a workspace held: little where it was NaN",
    (
        Change(
            "kernel.py",
            "TensorSpec(tuple(tensor.shape), self.dtype, zeroed=True)\n            for",
            "TensorSpec(tuple(tensor.shape), self.dtype)\n            for",
        ),
        Change(
            "kernel.py",
            "        dv = None if grads.dv is None else next(sums)\n",
            "        dv = None if grads.dv is None else next(sums)\n"
            "        noise = 0.0 if dk is None or not dk.isnan().any() else 1e-6\n"
            "        for tensor in (dk, dv):\n"
            "            if tensor is not None:\n"
            "                tensor.fill_(noise)\n",
        ),
    ),
    "determinism/scratch",
    "held zeros, not NaN",
)


def test_a_workspace_that_is_read_before_it_is_written_is_caught(tmp_path: Path) -> None:
    check_caught(_UNROUNDED_WHERE_ZERO, tmp_path)


def test_the_plugin_without_the_fault_passes(tmp_path: Path) -> None:
    check_passes([_UNROUNDED_WHERE_ZERO], tmp_path)
