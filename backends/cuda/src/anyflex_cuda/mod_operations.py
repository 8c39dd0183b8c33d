"""What the text of a mod calls in Gluon instead of `triton.language` and of the portable
`operations`: where layouts are part of a type, a scalar isn't broadcast without one."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["full", "load_once", "spread"]


@gluon.jit
def full(shape, value, dtype: gl.constexpr):
    """A scalar: `shape` is ()."""
    gl.static_assert(len(shape) == 0)
    return gl.full((), value, dtype)


@gluon.jit
def spread(x, score):
    """float32 in the shape of the score."""
    if x.type.is_block():
        return tl.broadcast_to(tl.cast(x, tl.float32), score.shape)
    else:
        return gl.full(score.shape, tl.cast(x, tl.float32), gl.float32, score.type.layout)


@gluon.jit
def load_once(pointers, inside, COPIES: gl.constexpr):
    """What lies there, 0 where not inside. The portable one may make copies of a row, for the sake
    of a layout that Triton then chooses; here the layout is the score's."""
    return tl.load(pointers, mask=inside, other=0)
