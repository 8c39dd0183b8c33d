"""What both passes of backward share: delta, rows' values, the gradient of a tile of scores.

dK and dV are made by key tiles (backward_keys.py), dQ and captured gradients by query tiles
(backward_queries.py). Every sum is made by one program in one order: no atomics but for captured
gradients.

FlashAttention-2's formulas (Dao, 2023): P from lse, dS = P * (dP - delta).
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyflex_triton.tiles import (
    LOG2E,
    load_rows,
    tensor_at,
)

__all__ = ["delta_kernel", "gradient_of_scores", "row_values"]

# Argument lists would be a line an argument.
# fmt: off


@triton.jit
def delta_kernel(
    out, rest, dout, dlse, given, delta, o_strides, r_strides, do_strides, dl_strides, heads,
    q_length, VALUE_DIM: tl.constexpr, DV: tl.constexpr, UNITS: tl.constexpr,
    SCATTERED: tl.constexpr, WIDE: tl.constexpr, HAS_DLSE: tl.constexpr, IS_GIVEN: tl.constexpr,
    HAS_REST: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """delta [B, Hq, L] = sum(out * dout) - dlse; the sum may be given. out is what was stored and
    the rest that rounding took from it."""
    tiles = (q_length + BLOCK_M - 1) // BLOCK_M
    bh = tl.program_id(0) // tiles
    b = bh // heads
    h = bh % heads
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < q_length
    at = bh.to(tl.int64) * q_length + rows
    if IS_GIVEN:
        sums = tl.load(given + at, mask=inside, other=0.0)
    else:
        o_base = tensor_at(out, o_strides, b, h, UNITS[0])
        do_base = tensor_at(dout, do_strides, b, h, UNITS[1])
        o = load_rows(
            o_base, o_strides, rows, q_length, VALUE_DIM, DV, UNITS[0], SCATTERED[0], WIDE, True
        )
        do = load_rows(
            do_base, do_strides, rows, q_length, VALUE_DIM, DV, UNITS[1], SCATTERED[1], WIDE, True
        )
        o = o.to(tl.float32)
        if HAS_REST:
            r_base = tensor_at(rest, r_strides, b, h, UNITS[2])
            o += load_rows(
                r_base, r_strides, rows, q_length, VALUE_DIM, DV, UNITS[2], False, WIDE, True,
            ).to(tl.float32)
        sums = tl.sum(o * do.to(tl.float32), 1)
    if HAS_DLSE:
        from_lse = dlse + b * dl_strides[0] + h * dl_strides[1] + rows * dl_strides[2]
        sums -= tl.load(from_lse, mask=inside, other=0.0)
    tl.store(delta + at, sums, mask=inside)


@triton.jit
def gradient_of_scores(
    q, k, do, v, live, lse2, delta, b, h, q_idx, kv_idx, tables, ints, floats, totals, scale,
    SCORE_MOD: tl.constexpr, SCORE_MOD_BACKWARD: tl.constexpr, CAPTURED_GRADIENTS: tl.constexpr,
    PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr,
):
    """Weights, and the gradient of q k^T, both 0 at dead pairs.

    Tiles are [M, N], or [N, M] where TRANSPOSED; all indices and row values come shaped for that.

    Args:
        lse2: in powers of two, +inf for rows without a live key.
        live: like the tile, or None where all are.
    """
    if TRANSPOSED:
        raw = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        dweights = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    else:
        raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dweights = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    if SCORE_MOD is None:
        scores = raw * (scale * LOG2E)
    else:
        raw = raw * scale
        scores = SCORE_MOD(raw, b, h, q_idx, kv_idx, tables, ints, floats) * LOG2E
    weights = tl.exp2(scores - lse2)
    if live is not None:
        live = live & (scores != float("-inf"))
        weights = tl.where(live, weights, 0.0)
        # Where weights are 0 the difference may be anything.
        grad = tl.where(live, weights * (dweights - delta), 0.0)
    else:
        grad = weights * (dweights - delta)
    if CAPTURED_GRADIENTS is not None:
        there = live if live is not None else weights == weights
        CAPTURED_GRADIENTS(grad, raw, there, b, h, q_idx, kv_idx, tables, ints, floats, totals)
    if SCORE_MOD_BACKWARD is not None:
        grad = SCORE_MOD_BACKWARD(grad, raw, b, h, q_idx, kv_idx, tables, ints, floats)
        if live is not None:
            grad = tl.where(live, grad, 0.0)
    return weights, grad


@triton.jit
def row_values(lse, delta, at, rows, end):
    """lse in powers of two and delta of query rows; such that weights become 0 in dead rows."""
    inside = rows < end
    natural = tl.load(lse + at + rows, mask=inside, other=float("-inf"))
    dead = natural == float("-inf")
    lse2 = tl.where(dead, float("inf"), natural * LOG2E)
    d = tl.load(delta + at + rows, mask=inside, other=0.0)
    return lse2, tl.where(dead, 0.0, d)
