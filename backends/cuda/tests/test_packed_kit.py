"""The conformance kit's packed sequences on Hopper's kernels: see packed_kit_in_python.py."""

from __future__ import annotations

import pytest
from scripts_beside import SOAK, printed_by

pytest.importorskip("triton", reason="triton is not installed")


def test_the_kit_s_packed_sequences_pass_on_hopper_s_kernels() -> None:
    lines = printed_by("packed_kit_in_python.py", interpreted=True)
    found = [line.split(": ", 1) for line in lines if line.startswith("ragged/")]
    passed = [name for name, how in found if how == "passed"]
    failed = [(name, how) for name, how in found if how.startswith("failed")]
    assert failed == [] and len(passed) >= (50 if SOAK else 6), found
