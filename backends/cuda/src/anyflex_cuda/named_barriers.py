"""Barriers of the hardware that Triton leaves free, 8 to 15, between partitions of a program."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["named_barrier"]


@gluon.jit
def named_barrier(DO: gl.constexpr, number, ALL: gl.constexpr, WARPS: gl.constexpr = 4):
    """One instruction of all threads of a partition of WARPS warps; the barrier is of ALL.

    Some partitions "sync", which waits, the others "arrive", which doesn't: what a thread wrote
    before it arrived is there for those that wait. Unlike an arrival at an mbarrier, which one
    thread makes when the others of its partition are there, it costs its partition no meeting. All
    as "sync" would do the same on Hopper, but a partition's code is its own, and compute-sanitizer
    takes one barrier awaited at two places for threads that have diverged.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    text: gl.constexpr = f"bar.{DO} $1, {ALL}; mov.b32 $0, $1;"
    numbers = gl.full([32 * WARPS], number, gl.int32, layout=LAYOUT)
    # No load or store may be moved past it.
    gl.inline_asm_elementwise(
        text, "=r,r,~{memory}", [numbers], dtype=gl.int32, is_pure=False, pack=1
    )
