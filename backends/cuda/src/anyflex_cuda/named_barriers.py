"""Named barriers 8 to 15, which Triton leaves free, between partitions of a program."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["named_barrier"]


@gluon.jit
def named_barrier(DO: gl.constexpr, number, ALL: gl.constexpr, WARPS: gl.constexpr = 4):
    """Execute one barrier instruction in all threads of a partition of WARPS warps. ALL threads
    take part in the barrier.

    Some partitions "sync", which waits, the others "arrive", which doesn't; writes before an
    arrival are visible after the wait. An arrival at an mbarrier is made by one thread after its
    partition has synchronized; this one needs no such synchronization. On Hopper all partitions
    could "sync", but each has its own code, and compute-sanitizer reports a barrier awaited at two
    places as divergent threads.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    text: gl.constexpr = f"bar.{DO} $1, {ALL}; mov.b32 $0, $1;"
    numbers = gl.full([32 * WARPS], number, gl.int32, layout=LAYOUT)
    # The memory clobber keeps loads and stores from moving past the barrier.
    gl.inline_asm_elementwise(
        text, "=r,r,~{memory}", [numbers], dtype=gl.int32, is_pure=False, pack=1
    )
