"""The sums of an online softmax when a row's largest score has grown."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["rescaled"]


@triton.constexpr_function
def instructions(count):
    """Of a thread with `count` elements of a product, which are of two rows: of each four the
    first two are of one, the last two of the other."""
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
    """A thread's sums that go out, those that come in, in the same registers, and their factors,
    in none of these: they are read after the first sum is written."""
    return ",".join(["=&f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescaled(acc, factors, COUNT: gl.constexpr):
    """acc * factors, of a product of 64 rows and 2 * COUNT columns. A warp whose factors are all 1
    jumps over it, which is an eighth of the instructions of a step of forward: a row's largest
    score is seldom among its last keys."""
    text: gl.constexpr = instructions(COUNT)
    types: gl.constexpr = operands(COUNT)
    return gl.inline_asm_elementwise(
        text, types, [acc, factors], dtype=gl.float32, is_pure=True, pack=COUNT
    )
