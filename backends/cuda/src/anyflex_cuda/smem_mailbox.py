"""Words of shared memory by which some warps say to others what those needn't find out: one what
it loads, four what came of their rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["WORDS", "said", "say"]

WORDS = gl.constexpr(8)
"""Room for what is said of a tile, or of a step."""


@gluon.jit
def say(words, at, value, WARPS: gl.constexpr = 1):
    """In a partition of WARPS warps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    words.index(at).store(gl.full([1], value, gl.int32, layout=LAYOUT))


@gluon.jit
def said(words, at, WARPS: gl.constexpr = 4):
    """In a partition of WARPS warps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(words.index(at).load(LAYOUT), 0)
