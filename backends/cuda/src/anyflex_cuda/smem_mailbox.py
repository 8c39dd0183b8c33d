"""Shared-memory mailbox between warps: words in which a producer warp tells consumers what it
loads, or a consumer reports on its rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["WORDS", "said", "say"]

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
