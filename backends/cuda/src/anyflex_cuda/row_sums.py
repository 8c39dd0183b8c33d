"""What is left of rows when their tile ends, beside out: lse, the largest score, and what backward
needs to know of both where they are huge."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anyflex_triton.device_functions import LOG2E, natural_scores

__all__ = ["write_row_sums"]

# Argument lists would be a line an argument.
# fmt: off


@gluon.jit
def write_row_sums(
    top, total, excess, nans, tops, lse, max_scores, at, inside, scale, SCORED: gl.constexpr,
    WANT_LSE: gl.constexpr, WANT_MAX: gl.constexpr, WANT_TOPS: gl.constexpr,
):
    """Args:
        top: each row's largest of `final_scores`.
        total: the sum of its weights, relative to 2^excess more than top.
        nans: above 0 where a score is NaN.
        tops: as of `anyflex_triton.forward.forward_kernel`.
        at: places of rows, of all rows of all heads; `inside`: which are some.
        SCORED: there is a score mod.
    """
    size = gl.log2(total) + excess
    highest = natural_scores(top, scale, SCORED)
    if WANT_LSE:
        dead = (top == float("-inf")) & (total == total)
        natural = gl.where(dead, float("-inf"), highest + size / LOG2E)
        gl.store(lse + at, natural, mask=inside)
    if WANT_MAX:
        gl.store(max_scores + at, gl.where(nans > 0, float("nan"), highest), mask=inside)
    if WANT_TOPS:
        gl.store(tops + at * 2, top, mask=inside)
        gl.store(tops + at * 2 + 1, size, mask=inside)
