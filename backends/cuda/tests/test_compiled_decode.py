"""Compiled code of Hopper's decoding: two programs fit a multiprocessor, and nothing spills."""

from __future__ import annotations

import json

import pytest
from scripts_beside import SOAK, printed_by

pytest.importorskip("triton", reason="triton is not installed")


from anyflex_cuda.decode_steps import NONE

SHARED = 228 * 1024 // 2 - 1024
"""Bytes of shared memory that each of two programs on a multiprocessor can have, without CUDA's
own."""


def test_decoding_compiles_without_spills_and_fits_twice() -> None:
    lines = printed_by("compiling_decode.py")
    every = [json.loads(line) for line in lines if line.startswith("{")]
    of_stored = [facts for facts in every if "stored" in facts]
    found = [facts for facts in every if "stored" not in facts]
    count = 9 if SOAK else 1
    ends = count + count
    of_steps, of_packed, of_calls = found[:count], found[count:ends], found[ends:]
    for facts in of_steps:
        assert facts["serialized"] == [] and facts["spills"] == facts["local"] == 0, facts
        assert facts["shared"] <= SHARED and facts["registers"] == 128, facts
        # Keys and values are loaded in boxes of 64 columns.
        name = facts["name"]
        wide = " 128 " in name
        assert facts["products"] == (12 if wide else 8)
        # Without a mask the first loads, one box per warp, are issued elsewhere.
        assert facts["loads"] == (4 if wide else 2) + (2 if f" {NONE.value} " in name else 0), (
            facts
        )
        # A program that finds all others counted sees what they have written.
        counting = ["atom.global.relaxed.gpu.cas.b64", "atom.global.gpu.acq_rel.add.u64"]
        assert facts["atomics"] == (counting if facts["adds"] else []), facts
        # These are a thread's loads in flight at once of the parts' values, and of their row_max
        # and row_sum.
        assert facts["past_first_cache"] == [16, 2], facts
    for facts in of_packed:
        # One number that is used at the ends of units may be spilled.
        assert facts["serialized"] == [] and facts["spills"] <= 4 and facts["local"] <= 3, facts
        assert facts["shared"] <= SHARED, facts
        # Pages of other sizes take boxes of their greatest common divisor with a step's 64 keys.
        boxes = 64 // {16: 16, 32: 32, 48: 16}.get(facts["page"], 64)
        loads = boxes * (4 if facts["dim"] == 128 else 2)
        # Without a mask the first loads are issued elsewhere too, whole boxes one per warp.
        first = (2 if boxes == 1 else loads) if facts["plan"] == NONE.value else 0
        assert facts["loads"] == loads + first, facts
    assert len(of_stored) == (5 if SOAK else 1)
    for facts in of_stored:
        tiles = facts["rows"] // 16
        assert facts["shared"] <= SHARED, facts
        # Some numbers that are used at the ends of units may be spilled; tiles of 32 rows may
        # spill more.
        assert (facts["spills"] <= 40 and facts["local"] == 0) or facts["rows"] == 32, facts
        # Two numbers are converted at a time, and 128 of each of 128 threads; no register moves.
        assert facts["conversions"] == 64 and facts["products"] == 32 * tiles, facts
        assert facts["wide_loads"] == 4 + 4 * tiles, facts
        assert facts["instructions"] <= 510 * tiles, facts
    assert [facts["name"] for facts in of_calls] == [
        "steps_kernel", "decode_kernel", "combine_kernel",
    ]  # fmt: skip
    assert all(facts["spills"] == 0 for facts in of_calls), of_calls
