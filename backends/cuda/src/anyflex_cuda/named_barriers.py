"""Barriers of the hardware that Triton leaves free, between two partitions of four warps."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["named_barrier"]


@gluon.jit
def named_barrier(DO: gl.constexpr, NUMBER: gl.constexpr):
    """One instruction of all 128 threads that call; the barrier is of 256.

    One partition's are "sync", which waits, the other's "arrive", which doesn't: what a thread
    wrote before it arrived is there for those that wait. Both as "sync" would do the same on
    Hopper, but a partition's code is its own, and compute-sanitizer takes one barrier awaited at
    two places for threads that have diverged.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    text: gl.constexpr = f"bar.{DO} {NUMBER}, 256; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(
        text, "=r,r", [gl.arange(0, 128, layout=LAYOUT)], dtype=gl.int32, is_pure=False, pack=1
    )
