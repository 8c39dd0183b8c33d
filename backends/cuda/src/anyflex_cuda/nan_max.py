"""Maximum of two values that propagates NaN, also as the step of a reduction."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["larger"]


@gluon.jit
def larger(x, y):
    """Return the larger of x and y, or NaN if either is NaN."""
    return gl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
