"""Softmax statistics of rows at the end of a tile: lse, the largest score, and what backward needs
where these are huge; and a maximum that propagates NaN."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anyflex_triton.device_functions import LOG2E, natural_scores, with_sink

__all__ = ["larger", "natural_base", "with_sinks", "write_row_sums"]

# Argument lists would be a line an argument.
# fmt: off


@gluon.jit
def larger(x, y):
    """Return the larger of x and y, or NaN if either is NaN."""
    return gl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def natural_base(row_max, scale, results):
    """Return the base, in powers of two, of weights that are relative to row_max."""
    return natural_scores(row_max, scale, results.SCORED) * LOG2E


@gluon.jit
def with_sinks(row_sum, row_max, base, head, results):
    """Return rows' sums of weights with the sinks', relative to `base`, which is in powers of two.

    Args:
        head: of each row, or of all.
        results: `anyflex_triton.kernel_records.RowResults`.
    """
    if results.sinks is None:
        return row_sum
    else:
        return with_sink(row_sum, row_max, base, gl.load(results.sinks + head))


@gluon.jit
def write_row_sums(row_max, row_sum, whole, excess, nans, at, inside, scale, results):
    """Write lse, the largest score and tops of rows, where they are wanted.

    Args:
        row_max: each row's largest of `final_scores`.
        row_sum: sum of each row's weights, relative to row_max plus excess, in powers of two.
        whole: the same with the sinks.
        nans: positive where a score is NaN.
        at: indices of rows, counted over all rows of all heads. inside: which of them exist.
        results: `anyflex_triton.kernel_records.RowResults`.
    """
    highest = natural_scores(row_max, scale, results.SCORED)
    if results.WANT_LSE:
        dead = (row_max == float("-inf")) & (row_sum == row_sum)
        size = gl.log2(row_sum) + excess
        natural = gl.where(dead, float("-inf"), highest + size / LOG2E)
        gl.store(results.lse + at, natural, mask=inside)
    if results.WANT_MAX:
        gl.store(results.max_scores + at, gl.where(nans > 0, float("nan"), highest), mask=inside)
    if results.WANT_TOPS:
        gl.store(results.tops + at * 2, row_max, mask=inside)
        gl.store(results.tops + at * 2 + 1, gl.log2(whole) + excess, mask=inside)
