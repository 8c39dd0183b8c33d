"""The larger of two values, as a step of a reduction too."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["larger"]


@gluon.jit
def larger(x, y):
    """NaN if one of them is."""
    return gl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
