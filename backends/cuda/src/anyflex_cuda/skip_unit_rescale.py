"""Rescaling of an online softmax's accumulator that skips factors of 1."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["rescaled"]


@triton.constexpr_function
def instructions(count):
    """Return PTX for a thread with `count` elements of a product, which belong to two rows: of
    every four elements the first two are of one row, the last two of the other."""
    factors = 2 * count
    return "\n".join(
        [
            "{ .reg .pred grown;",
            f"setp.neu.f32 grown, ${factors}, 0f3F800000;",
            f"setp.neu.or.f32 grown, ${factors + 2}, 0f3F800000, grown;",
            "vote.sync.any.pred grown, grown, 0xffffffff;",
            "@!grown bra.uni SAME;",
            *(f"mul.f32 ${i}, ${i}, ${factors + i};" for i in range(count)),
            "SAME: }",
        ]
    )


@triton.constexpr_function
def operands(count):
    """Return the constraints of `instructions`: a thread's accumulator out, in the same registers
    in, and its factors, in other registers, because they are read after the first output is
    written."""
    return ",".join(["=&f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescaled(acc, factors, COUNT: gl.constexpr):
    """Return acc * factors, for a product of 64 rows and 2 * COUNT columns. A warp whose factors
    are all 1 skips the multiplications, an eighth of the instructions of a step of forward: a
    row_max seldom grows in later steps."""
    text: gl.constexpr = instructions(COUNT)
    types: gl.constexpr = operands(COUNT)
    return gl.inline_asm_elementwise(
        text, types, [acc, factors], dtype=gl.float32, is_pure=True, pack=COUNT
    )
