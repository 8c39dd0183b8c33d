"""Decoding of packed sequences through the backend, without a GPU: see
packed_decode_in_python.py."""

from __future__ import annotations

import pytest
from scripts_beside import SOAK, printed_by

pytest.importorskip("triton", reason="triton is not installed")


def test_calls_give_the_reference_s_outputs_whatever_lies_behind_a_sequence_s_keys() -> None:
    lines = printed_by("packed_decode_in_python.py", interpreted=True)
    assert sum(": right" in line for line in lines) == (58 if SOAK else 9), lines
