"""Compiled code of Blackwell's forward: it fits, and hardly spills."""

from __future__ import annotations

import json

import pytest
from scripts_beside import SOAK, printed_by

TRITON = pytest.importorskip("triton", reason="triton is not installed").__version__

SHARED = 232_448
"""Bytes of shared memory that a program can have on Blackwell."""
TENSOR = 512
"""Number of columns of tensor memory."""
REGISTERS = 65_536
"""Number of registers of a multiprocessor."""


def test_forward_compiles_for_sm_100_within_its_memories_with_products_of_tcgen05() -> None:
    lines = printed_by("compiling_blackwell.py")
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(found) == (5 if SOAK else 1)
    for facts in found:
        assert facts["shared"] <= SHARED and facts["tensor"] <= TENSOR, facts
        assert 0 < facts["registers"] * facts["warps"] * 32 <= REGISTERS, facts
        # Products of scores and of values, for two groups, within the loop and behind it.
        assert facts["products"] >= 40 and facts["commits"] >= 8, facts
        assert min(facts["reads"], facts["writes"], facts["loads"], facts["stores"]) > 0, facts
        # Each of two groups has one loop, and another one where steps may have dead pairs.
        assert facts["loops"] in (2, 4), facts
        # With Triton 3.6 a loop loads and stores values that its branch's reduction leaves
        # undefined; newer versions spill a few keys' indices for the mask that reads captured
        # tensors.
        most = (32, 4) if TRITON.startswith("3.6.") else (160, 32)
        assert facts["spills"] <= most[0] and facts["local"] <= most[1], facts
