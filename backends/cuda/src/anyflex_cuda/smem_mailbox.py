"""How warps tell each other what they did: a mailbox in shared memory, and named barriers.

In the mailbox's words a producer warp tells consumers what it loads, or a consumer reports on its
rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["WORDS", "named_barrier", "said", "say"]

WORDS = gl.constexpr(8)
"""Number of int32 words per tile, or per step."""


@gluon.jit
def say(words, at, value, WARPS: gl.constexpr = 1):
    """Write `value` to word `at`, from a partition of WARPS warps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    words.index(at).store(gl.full([1], value, gl.int32, layout=LAYOUT))


@gluon.jit
def said(words, at, WARPS: gl.constexpr = 4):
    """Return word `at`, in a partition of WARPS warps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(words.index(at).load(LAYOUT), 0)


@gluon.jit
def named_barrier(DO: gl.constexpr, number, ALL: gl.constexpr, WARPS: gl.constexpr = 4):
    """Execute one barrier instruction in all threads of a partition of WARPS warps. ALL threads
    take part in the barrier, whose number is 8 to 15, which Triton leaves free.

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
