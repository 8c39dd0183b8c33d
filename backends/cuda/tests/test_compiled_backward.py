"""Backward's kernels compile for Hopper, and what comes of it can run: compiling_backward.py."""

from __future__ import annotations

import pytest
from scripts_beside import printed_by

pytest.importorskip("triton", reason="triton is not installed")

SHARED = 227 * 1024
"""Bytes that a program of Hopper may have."""
SPILLED = 500
"""Bytes, with Triton 3.6 at most 388, with 3.9 484; the rest is room for newer ones: scalars of
the loops over runs and heads, and in the loop of steps that have a mask what it reads of tensors,
or with a soft cap some registers."""
BY_PAIR = 800
"""Where biases by distance learn, an address a pair; with Triton 3.6 272, with 3.9 628."""
REPAIRED = 500
"""Of the kernel that makes again what isn't finite, which is seldom; with Triton 3.6 at most
408."""


def test_backward_fits_hopper_and_its_products_do_not_wait_for_each_other() -> None:
    lines = printed_by("compiling_backward.py")
    found = [line.split() for line in lines]
    assert sum(line[1] == "backward_kernel" for line in found) == 12
    for case, kernel, shared, spilled, products, loops, unfenced in found:
        assert products == "free", (case, kernel)
        assert int(shared) <= SHARED, (case, kernel, shared)
        bare, handed = map(int, unfenced.split("/"))
        # Each of two consumers: score gradients and dQ, in two passes, and a tile's end.
        assert bare == 0 and (handed >= 10 or kernel != "backward_kernel"), (case, unfenced)
        if kernel == "backward_kernel" and not case.startswith("full"):
            # Two passes of each of two consumers and of the producer. Triton 3.6 may take every
            # run for the first one, where a run's bounds are loaded a run ahead.
            assert loops == "6/6", (case, loops)
        # Where many tensors and their strides stand is kept in memory.
        if not case.startswith("many"):
            limit = REPAIRED
            if kernel == "backward_kernel":
                limit = BY_PAIR if case.startswith("distances") else SPILLED
            assert int(spilled) <= limit, (case, kernel, spilled)
