"""Backward's kernels compile for Hopper to code that can run: see compiling_backward.py."""

from __future__ import annotations

import re

import pytest
from scripts_beside import SOAK, printed_by

pytest.importorskip("triton", reason="triton is not installed")

SHARED = 227 * 1024
"""Bytes of shared memory that a program on Hopper can have."""
SPILLED = 500
"""Maximum bytes of spills. Triton 3.6 has at most 388 and 3.9 484; the rest is margin for newer
versions. Spilled are scalars of the loops over runs and heads, and in the loop of masked steps
what the mask reads of tensors, or with a soft cap some registers."""
WITHOUT_DQ = 550
"""Maximum bytes of spills of the kernel that leaves dQ to the portable pass; Triton 3.6 has at
most 108, 3.9 508."""
BY_PAIR = 64
"""Maximum bytes of spills of the portable pass over query rows where biases by distance learn,
with one address per pair; Triton 3.6 has at most 32, 3.9 52. The table's entry for head dim 64 has
4 KiB."""
WIDE = 350
"""Maximum bytes of spills of dQ's kernel above head dim 128; Triton 3.6 has at most 104, 3.9 304,
some of them in the loop of masked steps. The kernel of dK and dV has none."""
REPAIRED = 500, 4000
"""Maximum bytes of spills of the repair kernel, which seldom runs, and of the same above head dim
128; Triton 3.6 has at most 408 and 3244."""


def test_backward_fits_hopper_and_its_products_do_not_wait_for_each_other() -> None:
    lines = printed_by("compiling_backward.py")
    found = [line.split() for line in lines]
    assert sum(line[1] == "backward_kernel" for line in found) == (17 if SOAK else 1)
    assert sum(line[1].startswith("wide") for line in found) == (10 if SOAK else 2)
    for case, kernel, shared, spilled, products, loops, unfenced in found:
        assert products == "free", (case, kernel)
        assert int(shared) <= SHARED, (case, kernel, shared)
        bare, handed = map(int, unfenced.split("/"))
        # Each of two consumers hands over score gradients and dQ, in two passes, and its results
        # at a tile's end. Where the portable pass makes dQ, and above head dim 128, only the last.
        ours = kernel == "backward_kernel" or kernel.startswith("wide")
        least = 2 if kernel.startswith("wide") else 4 if case.startswith("distances") else 10
        if "(64,64)" in case:
            # With a score mod a consumer adds its own keys' part of dQ, and hands nothing over.
            least = min(least, 8)
        if case.endswith("split"):
            # Sums are stored by pointers.
            least -= 2 if kernel.startswith("wide") else 4
        assert bare == 0 and (handed >= least or not ours), (case, unfenced)
        if ours and not case.startswith("full"):
            # There are two passes of each of two consumers and of the producer. Triton 3.6 may
            # take every run for the first one where a run's bounds are loaded one run ahead.
            assert loops == "6/6", (case, loops)
        # Pointers and strides of many tensors are kept in local memory.
        if not case.startswith("many"):
            main = WITHOUT_DQ if case.startswith("distances") else SPILLED
            above_128 = max(map(int, re.findall(r"\d+", case))) > 128
            limit = {
                "backward_kernel": main,
                "query_kernel": BY_PAIR,
                "wide_keys": 0,
                "wide_queries": WIDE,
            }.get(kernel, REPAIRED[above_128])
            assert int(spilled) <= limit, (case, kernel, spilled)
