"""What Triton and ptxas make of Hopper's decoding: it fits twice, and nothing of it spills."""

from __future__ import annotations

import json

import pytest
from scripts_beside import every_case, printed_by

pytest.importorskip("triton", reason="triton is not installed")

from anyflex_cuda.decode_steps import NONE

SHARED = 228 * 1024 // 2 - 1024
"""Bytes that each of two programs can have of a multiprocessor's, without what CUDA takes."""


def test_decoding_compiles_without_spills_and_fits_twice() -> None:
    lines = printed_by("compiling_decode.py")
    found = [json.loads(line) for line in lines if line.startswith("{")]
    count = 9 if every_case() else 5
    of_steps, of_calls = found[:count], found[count:]
    for facts in of_steps:
        assert facts["serialized"] == [] and facts["spills"] == facts["local"] == 0, facts
        assert facts["shared"] <= SHARED and facts["registers"] == 128, facts
        # Keys and values, in boxes of 64 columns.
        name = facts["name"]
        wide = " 128 " in name
        assert facts["products"] == (12 if wide else 8)
        # Without a mask the first ones, of which each warp has a box, are issued elsewhere.
        assert facts["loads"] == (4 if wide else 2) + (2 if f" {NONE.value} " in name else 0), (
            facts
        )
        # A program that finds all others counted sees what they have written.
        counting = ["atom.global.relaxed.gpu.cas.b64", "atom.global.gpu.acq_rel.add.u64"]
        assert facts["atomics"] == (counting if facts["adds"] else []), facts
        # A thread's values of the parts that are on their way at once, and their tops and totals.
        assert facts["past_first_cache"] == ([16, 2] if facts["adds"] else [0, 0]), facts
    assert [facts["name"] for facts in of_calls] == [
        "steps_kernel", "decode_kernel", "combine_kernel",
    ]  # fmt: skip
    assert all(facts["spills"] == 0 for facts in of_calls), of_calls
