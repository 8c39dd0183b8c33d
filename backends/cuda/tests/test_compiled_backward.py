"""Backward's kernels compile for Hopper, and what comes of it can run: compiling_backward.py."""

from __future__ import annotations

import re

import pytest
from scripts_beside import every_case, printed_by

pytest.importorskip("triton", reason="triton is not installed")

SHARED = 227 * 1024
"""Bytes that a program of Hopper may have."""
SPILLED = 500
"""Bytes, with Triton 3.6 at most 388, with 3.9 484; the rest is room for newer ones: scalars of
the loops over runs and heads, and in the loop of steps that have a mask what it reads of tensors,
or with a soft cap some registers."""
WITHOUT_DQ = 550
"""Of the kernel that leaves dQ to the portable pass; with Triton 3.6 at most 108, with 3.9 508."""
BY_PAIR = 64
"""Of the portable pass over query rows where biases by distance learn, an address a pair; with
Triton 3.6 at most 32, with 3.9 52. The table's entry for head dim 64 has 4 KiB."""
WIDE = 350
"""Of dQ's above head dim 128; with Triton 3.6 at most 104, with 3.9 304, of which the loop of
steps that have a mask has some. That of dK and dV has none."""
REPAIRED = 500, 4000
"""Of the kernel that makes again what isn't finite, which is seldom, and above head dim 128; with
Triton 3.6 at most 408 and 3244."""


def test_backward_fits_hopper_and_its_products_do_not_wait_for_each_other() -> None:
    lines = printed_by("compiling_backward.py")
    found = [line.split() for line in lines]
    assert sum(line[1] == "backward_kernel" for line in found) == (13 if every_case() else 6)
    assert sum(line[1].startswith("wide") for line in found) == (10 if every_case() else 2)
    for case, kernel, shared, spilled, products, loops, unfenced in found:
        assert products == "free", (case, kernel)
        assert int(shared) <= SHARED, (case, kernel, shared)
        bare, handed = map(int, unfenced.split("/"))
        # Each of two consumers: score gradients and dQ, in two passes, and a tile's end. Where the
        # portable pass makes dQ, and above head dim 128, the last alone.
        ours = kernel == "backward_kernel" or kernel.startswith("wide")
        least = 2 if kernel.startswith("wide") else 4 if case.startswith("distances") else 10
        assert bare == 0 and (handed >= least or not ours), (case, unfenced)
        if ours and not case.startswith("full"):
            # Two passes of each of two consumers and of the producer. Triton 3.6 may take every
            # run for the first one, where a run's bounds are loaded a run ahead.
            assert loops == "6/6", (case, loops)
        # Where many tensors and their strides stand is kept in memory.
        if not case.startswith("many"):
            main = WITHOUT_DQ if case.startswith("distances") else SPILLED
            above_128 = max(map(int, re.findall(r"\d+", case))) > 128
            limit = {
                "backward_kernel": main,
                "query_kernel": BY_PAIR,
                "wide_key_kernel": 0,
                "wide_query_kernel": WIDE,
            }.get(kernel, REPAIRED[above_128])
            assert int(spilled) <= limit, (case, kernel, spilled)
