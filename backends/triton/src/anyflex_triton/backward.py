"""Parts that both passes of backward share: row values, and the gradient of a tile of scores.

backward_keys.py computes dK and dV by key tiles, backward_queries.py dQ and captured gradients by
query tiles. No sum but captured gradients' depends on the order of programs; only those use
atomics.

FlashAttention-2's formulas (Dao, 2023): P from lse, dS = P * (dP - delta).

P is 2^(score * unit - lse2). A large lse2 makes all weights of the row wrong by its rounding; a
huge one, as of rows whose scores all are the lowest float, overflows or has lost the logarithm of
row_sum. Such a row is far: its lse2 is NaN, so that the sums of its tiles are NaN too. Those tiles
are computed again in careful steps, from the row_max and row_sum that forward has saved.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyflex_triton.column_parts import product_of_rows
from anyflex_triton.dependent_launch import let_next_begin
from anyflex_triton.dropout import kept_pairs
from anyflex_triton.forward import final_scores, unit_of_scores
from anyflex_triton.kernel_records import DeltaSources
from anyflex_triton.operations import integer_shift, scaled
from anyflex_triton.tiles import LOG2E, load_rows, tensor_at

__all__ = [
    "gradient_of_scores",
    "row_kernel",
    "store_row_values",
    "total_kernel",
]

# Argument lists would be a line an argument.
# fmt: off

FAR_LSE = tl.constexpr(131072.0)
"""Size of lse2, in powers of two, from which a row is far. Below it all weights of a row are off
by at most 2^(1 / 256), as much as 16-bit types round them."""


@triton.jit
def delta_of_rows(sources, bh, heads, rows, q_length):
    """Return sum(out * dout) - dlse for one head's rows.

    Args:
        sources: `DeltaSources`.
    """
    b = bh // heads
    h = bh % heads
    inside = rows < q_length
    if sources.IS_GIVEN:
        sums = tl.load(sources.given + bh.to(tl.int64) * q_length + rows, mask=inside, other=0.0)
    else:
        o_base = tensor_at(sources.out, sources.o_strides, b, h, sources.UNITS[0])
        do_base = tensor_at(sources.dout, sources.do_strides, b, h, sources.UNITS[1])
        o = load_rows(
            o_base, sources.o_strides, rows, q_length, sources.VALUE_DIM, sources.DV,
            sources.UNITS[0], sources.SCATTERED[0], sources.WIDE, True,
        )
        do = load_rows(
            do_base, sources.do_strides, rows, q_length, sources.VALUE_DIM, sources.DV,
            sources.UNITS[1], sources.SCATTERED[1], sources.WIDE, True,
        )
        o = o.to(tl.float32)
        if sources.HAS_REST:
            r_base = tensor_at(sources.rest, sources.r_strides, b, h, sources.UNITS[2])
            o += load_rows(
                r_base, sources.r_strides, rows, q_length, sources.VALUE_DIM, sources.DV,
                sources.UNITS[2], False, sources.WIDE, True,
            ).to(tl.float32)
        sums = tl.sum(o * do.to(tl.float32), 1)
    if sources.HAS_DLSE:
        strides = sources.dl_strides
        from_lse = sources.dlse + b * strides[0] + h * strides[1] + rows * strides[2]
        sums -= tl.load(from_lse, mask=inside, other=0.0)
    return sums


@triton.jit
def store_row_values(
    sources, lse, tops, row_values, bh, heads, rows, q_length, values_of_head, values_in_all,
    stored, scale, SCORED: tl.constexpr, WANT_DELTA: tl.constexpr,
):
    """Store the row values of one head's rows: see `row_kernel`.

    Args:
        sources: `DeltaSources`.
        stored: which rows are stored, or None for all.
    """
    inside = rows < q_length
    at = bh.to(tl.int64) * q_length + rows
    value_at = bh.to(tl.int64) * values_of_head + rows
    natural = tl.load(lse + at, mask=inside, other=float("-inf"))
    dead = natural == float("-inf")
    lse2 = tl.where(dead, float("inf"), natural * LOG2E)
    far = (tl.abs(lse2) >= FAR_LSE) & (tl.abs(natural) < float("inf"))
    if sources.IS_GIVEN:
        # lse covers keys that forward hasn't seen, so forward's row_max doesn't hold.
        top = natural if SCORED else natural / scale
        size = tl.zeros_like(natural)
    else:
        top = tl.load(tops + at * 2, mask=inside & far, other=0.0)
        size = tl.load(tops + at * 2 + 1, mask=inside & far, other=0.0)
    tl.store(row_values + value_at, tl.where(far, float("nan"), lse2), mask=stored)
    careful = row_values + values_in_all
    tl.store(careful + value_at, tl.where(far, top, 0.0), mask=stored)
    tl.store(careful + values_in_all + value_at, tl.where(far, size, lse2), mask=stored)
    if WANT_DELTA:
        sums = delta_of_rows(sources, bh, heads, rows, q_length)
        sums = tl.where(dead, 0.0, sums)
        tl.store(row_values + 3 * values_in_all + value_at, sums, mask=stored)


@triton.jit
def row_kernel(
    out, rest, tops, dout, lse, dlse, given, row_values, o_strides, r_strides, do_strides,
    dl_strides, scale, heads, values_of_head, values_in_all, q_length,
    VALUE_DIM: tl.constexpr, DV: tl.constexpr, UNITS: tl.constexpr, SCATTERED: tl.constexpr,
    WIDE: tl.constexpr, SCORED: tl.constexpr, HAS_DLSE: tl.constexpr, IS_GIVEN: tl.constexpr,
    HAS_REST: tl.constexpr, WANT_DELTA: tl.constexpr, LEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Store row_values [4, B, Hq, values_of_head]: lse2, lse in powers of two, which is +inf in
    rows without a live key so that weights become 0, and NaN in far rows; two values for CAREFUL
    steps: in far rows row_max and the logarithm of row_sum, in others 0 and lse; then, where
    WANT_DELTA, delta = sum(out * dout) - dlse, 0 in rows without a live key.
    """
    if LEADS:
        let_next_begin()
    tiles = (q_length + BLOCK_M - 1) // BLOCK_M
    bh = tl.program_id(0) // tiles
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    sources = DeltaSources(
        out=out, rest=rest, dout=dout, dlse=dlse, given=given, o_strides=o_strides,
        r_strides=r_strides, do_strides=do_strides, dl_strides=dl_strides, VALUE_DIM=VALUE_DIM,
        DV=DV, UNITS=UNITS, SCATTERED=SCATTERED, WIDE=WIDE, HAS_DLSE=HAS_DLSE, IS_GIVEN=IS_GIVEN,
        HAS_REST=HAS_REST,
    )
    store_row_values(
        sources, lse, tops, row_values, bh, heads, rows, q_length, values_of_head, values_in_all,
        rows < values_of_head, scale, SCORED, WANT_DELTA,
    )


@triton.jit
def total_kernel(total, integers, largest, counts, count, BLOCK: tl.constexpr):
    """Add the numbers that integers stand for (`operations.accumulate`) to total [count]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    shift = integer_shift(
        tl.load(largest + at, mask=inside, other=0), tl.load(counts + at, mask=inside, other=0)
    )
    added = scaled(tl.load(integers + at, mask=inside, other=0).to(tl.float32), -shift)
    before = tl.load(total + at, mask=inside)
    tl.store(total + at, before + added, mask=inside)


@triton.jit
def gradient_of_scores(
    q, k, do, v, masked, inside, full, row_values, inputs, mods, gradients,
    PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr, CAREFUL: tl.constexpr,
):
    """Return the weights after dropout, and the gradient of q k^T, both 0 at dead pairs.

    Tiles are [M, N], or [N, M] where TRANSPOSED; all indices and row values have shapes for that.

    Args:
        q, k, do, v: in parts (`column_parts`).
        masked, inside, full: arguments of `masked_scores`.
        row_values, inputs, mods, gradients: `RowValues`, `ModInputs`, `Mods`, `ModGradients`.
        CAREFUL: some element of a tensor is non-finite, or some row is far. Otherwise the values
            at dead pairs are finite, and 0 times them is 0.
    """
    if TRANSPOSED:
        raw = product_of_rows(k, q, PRECISION)
    else:
        raw = product_of_rows(q, k, PRECISION)
    if mods.SCORE_MOD is not None:
        raw = raw * mods.scale
    scores = final_scores(raw, masked, inside, full, inputs, mods)
    # The weights are computed while this product runs.
    if TRANSPOSED:
        dweights = product_of_rows(v, do, PRECISION)
    else:
        dweights = product_of_rows(do, v, PRECISION)
    if inputs.dropout is not None:
        kept = kept_pairs(inputs.dropout, inputs.kv_idx)
        dweights = tl.where(kept, dweights * inputs.dropout.scale, 0.0)
    lse2 = row_values.lse2
    unit = unit_of_scores(mods.scale, mods.SCORE_MOD)
    if CAREFUL:
        exponent = (scores - row_values.row_max) * unit - row_values.size
        # Products that are summed in another order than forward's may exceed its row_max.
        weights = tl.exp2(tl.where(exponent > 0.0, 0.0, exponent))
    else:
        weights = tl.exp2(scores * unit - lse2)
    grad = weights * (dweights - row_values.delta)
    if CAREFUL:
        live = scores != float("-inf")
        weights = tl.where(live, weights, 0.0)
        grad = tl.where(live, grad, 0.0)
    if gradients.CAPTURED_GRADIENTS is not None:
        if CAREFUL:
            # The other pairs have been added. But Hopper's kernel leaves out pairs without weight,
            # whose gradients are 0 or non-finite: adding those twice does no harm.
            there = live & ((lse2 != lse2) | (weights == 0.0))
        else:
            there = (scores != float("-inf")) & (lse2 < float("inf"))
        gradients.CAPTURED_GRADIENTS(
            grad, raw, there, inputs.b, inputs.h, inputs.q_idx, inputs.kv_idx, inputs.tables,
            mods.ints, mods.floats, gradients.totals,
        )
    if gradients.SCORE_MOD_BACKWARD is not None:
        grad = gradients.SCORE_MOD_BACKWARD(
            grad, raw, inputs.b, inputs.h, inputs.q_idx, inputs.kv_idx, inputs.tables, mods.ints,
            mods.floats,
        )
        if masked is not None:
            # The mod's derivative may be anything at dead pairs.
            grad = tl.where(scores != float("-inf"), grad, 0.0)
    if inputs.dropout is not None:
        weights = tl.where(kept, weights * inputs.dropout.scale, 0.0)
    return weights, grad
