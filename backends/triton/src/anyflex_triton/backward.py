"""The backward pass: delta, then dK and dV by key tiles, then dQ and captured gradients by query
tiles. Every sum is made by one program in one order: no atomics but for captured gradients.

FlashAttention-2's formulas (Dao, 2023): P from lse, dS = P * (dP - delta).
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyflex_triton.forward import tile_of_program
from anyflex_triton.tiles import (
    LOG2E,
    bounded_run,
    load_rows,
    load_tile,
    mask_row,
    store_rows,
    tensor_at,
    without_strange,
)

__all__ = ["delta_kernel", "key_kernel", "query_kernel"]

# Argument lists would be a line an argument.
# fmt: off


@triton.jit
def delta_kernel(
    out, dout, dlse, given, delta, o_strides, do_strides, dl_strides, heads, q_length,
    VALUE_DIM: tl.constexpr, DV: tl.constexpr, UNITS: tl.constexpr, SCATTERED: tl.constexpr,
    WIDE: tl.constexpr, HAS_DLSE: tl.constexpr, IS_GIVEN: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """delta [B, Hq, L] = sum(out * dout) - dlse; the sum may be given."""
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
        sums = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
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


@triton.jit
def key_kernel(
    query, key, value, dout, lse, delta, dk, dv, offsets, runs, q_strides, k_strides, v_strides,
    do_strides, dk_strides, dv_strides, mask_strides, tables, ints, floats, shifts, scale, batch,
    heads, kv_batch_heads, kv_heads, q_length, kv_length, tiles, head_group,
    SCORE_MOD: tl.constexpr, SCORE_MOD_BACKWARD: tl.constexpr, MASK_MOD: tl.constexpr,
    HAS_MASK: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    KV_SHARED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, UNITS: tl.constexpr, SCATTERED: tl.constexpr, WIDE: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """dK and dV: one program a tile of BLOCK_N keys of one key head, over all that read it.

    Args:
        offsets, runs: of the transposed mask: a row is a row of key blocks, runs count q blocks.
    """
    tile, unit = tile_of_program(tl.program_id(0), tiles, kv_batch_heads, head_group)
    kv_b = unit // kv_heads
    kv_head = unit % kv_heads
    if HAS_MASK:
        TILES_A_BLOCK: tl.constexpr = (KV_BLOCK + BLOCK_N - 1) // BLOCK_N
        block = tile // TILES_A_BLOCK
        first_key = block * KV_BLOCK + (tile % TILES_A_BLOCK) * BLOCK_N
        end_key = tl.minimum((block + 1) * KV_BLOCK, kv_length)
    else:
        block = 0
        first_key = tile * BLOCK_N
        end_key = kv_length
    if first_key >= end_key:
        return
    keys = first_key + tl.arange(0, BLOCK_N)
    k_base = tensor_at(key, k_strides, kv_b, kv_head, UNITS[1])
    v_base = tensor_at(value, v_strides, kv_b, kv_head, UNITS[2])
    k = load_rows(k_base, k_strides, keys, end_key, DIM, D, UNITS[1], SCATTERED[1], WIDE, True)
    v = load_rows(
        v_base, v_strides, keys, end_key, VALUE_DIM, DV, UNITS[2], SCATTERED[2], WIDE, True
    )
    kv_idx = tl.minimum(keys, kv_length - 1)[:, None] + shifts[3]
    key_inside = (keys < end_key)[:, None]
    dk_sum = tl.zeros([BLOCK_N, D], tl.float32)
    dv_sum = tl.zeros([BLOCK_N, DV], tl.float32)
    rows_of_tile = tl.arange(0, BLOCK_M)

    streams = GROUP * batch if KV_SHARED else GROUP
    for stream in range(streams):
        b = stream // GROUP if KV_SHARED else kv_b
        h = kv_head * GROUP + stream % GROUP
        mod_b = b + shifts[0]
        mod_h = h + shifts[1]
        if DESCRIBED:
            q_base = 0
            do_base = 0
        else:
            q_base = tensor_at(query, q_strides, b, h, UNITS[0])
            do_base = tensor_at(dout, do_strides, b, h, UNITS[3])
        first_row = (b * heads + h) * q_length
        at = (b * heads + h).to(tl.int64) * q_length
        if HAS_MASK:
            run, last_run = mask_row(offsets, mask_strides, b, h, block)
        else:
            run = 0
            last_run = 1

        for r in range(run, last_run):
            if HAS_MASK:
                begin, end, full = bounded_run(runs, r, Q_BLOCK, q_length)
                # A tile of keys that isn't whole has pairs that are none.
                full = full & (first_key + BLOCK_N <= end_key)
                steps = tl.where(full, (end - begin) // BLOCK_M, 0)
            else:
                begin = 0
                steps = tl.where(first_key + BLOCK_N <= end_key, q_length // BLOCK_M, 0)
            for step in range(steps):
                first = begin + step * BLOCK_M
                rows = first + rows_of_tile
                q = load_tile(
                    query, q_base, q_strides, first_row, first, rows_of_tile, 0, DIM, D, UNITS[0],
                    SCATTERED[0], WIDE, False, DESCRIBED,
                )
                do = load_tile(
                    dout, do_base, do_strides, first_row, first, rows_of_tile, 0, VALUE_DIM, DV,
                    UNITS[3], SCATTERED[3], WIDE, False, DESCRIBED,
                )
                lse2, d = row_values(lse, delta, at, rows, q_length)
                weights, grad = gradient_of_scores(
                    q, k, do, v, None, lse2[None, :], d[None, :], mod_b, mod_h,
                    rows[None, :] + shifts[2], kv_idx, tables, ints, floats, None, scale,
                    SCORE_MOD, SCORE_MOD_BACKWARD, None, PRECISION, True,
                )
                if WANT_DV:
                    dv_sum = tl.dot(weights.to(do.dtype), do, dv_sum, input_precision=PRECISION)
                if WANT_DK:
                    dk_sum = tl.dot(grad.to(q.dtype), q, dk_sum, input_precision=PRECISION)

        for r in range(run, last_run):
            if HAS_MASK:
                begin, end, full = bounded_run(runs, r, Q_BLOCK, q_length)
                whole = full & (first_key + BLOCK_N <= end_key)
                begin = tl.where(whole, begin + (end - begin) // BLOCK_M * BLOCK_M, begin)
            else:
                whole = first_key + BLOCK_N <= end_key
                begin = tl.where(whole, q_length // BLOCK_M * BLOCK_M, 0)
                end = q_length
                full = True
            for first in range(begin, end, BLOCK_M):
                rows = first + rows_of_tile
                q = load_tile(
                    query, q_base, q_strides, first_row, first, rows_of_tile, end, DIM, D,
                    UNITS[0], SCATTERED[0], WIDE, True, DESCRIBED,
                )
                do = load_tile(
                    dout, do_base, do_strides, first_row, first, rows_of_tile, end, VALUE_DIM, DV,
                    UNITS[3], SCATTERED[3], WIDE, True, DESCRIBED,
                )
                lse2, d = row_values(lse, delta, at, rows, end)
                q_idx = tl.minimum(rows, q_length - 1)[None, :] + shifts[2]
                alive = lse2 != float("inf")
                do = tl.where(alive[:, None], do, tl.zeros_like(do))
                live = (rows < end)[None, :] & key_inside & alive[None, :]
                if MASK_MOD is not None:
                    live = live & (
                        full | MASK_MOD(mod_b, mod_h, q_idx, kv_idx, tables, ints, floats)
                    )
                weights, grad = gradient_of_scores(
                    q, k, do, v, live, lse2[None, :], d[None, :], mod_b, mod_h, q_idx, kv_idx,
                    tables, ints, floats, None, scale, SCORE_MOD, SCORE_MOD_BACKWARD, None,
                    PRECISION, True,
                )
                if WANT_DV:
                    dv_sum = tl.dot(weights.to(do.dtype), do, dv_sum, input_precision=PRECISION)
                if WANT_DK:
                    # A query that isn't finite has NaN in its live pairs already.
                    dk_sum = tl.dot(
                        grad.to(q.dtype), without_strange(q), dk_sum, input_precision=PRECISION
                    )

    if WANT_DV:
        base = tensor_at(dv, dv_strides, kv_b, kv_head, UNITS[5])
        store_rows(base, dv_strides, keys, end_key, dv_sum, VALUE_DIM, DV, UNITS[5], WIDE)
    if WANT_DK:
        base = tensor_at(dk, dk_strides, kv_b, kv_head, UNITS[4])
        store_rows(base, dk_strides, keys, end_key, dk_sum * scale, DIM, D, UNITS[4], WIDE)


@triton.jit
def query_kernel(
    query, key, value, dout, lse, delta, dq, offsets, runs, q_strides, k_strides, v_strides,
    do_strides, dq_strides, mask_strides, tables, ints, floats, shifts, totals, scale,
    batch_heads, heads, q_length, kv_length, tiles, head_group, SCORE_MOD: tl.constexpr,
    SCORE_MOD_BACKWARD: tl.constexpr, CAPTURED_GRADIENTS: tl.constexpr, MASK_MOD: tl.constexpr,
    HAS_MASK: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    KV_SHARED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, UNITS: tl.constexpr, SCATTERED: tl.constexpr, WIDE: tl.constexpr,
    WANT_DQ: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """dQ, and the gradients of captured tensors: one program a query tile, as in forward.

    Args:
        totals: accumulators of the captured tensors that learn, added to atomically.
    """
    tile, bh = tile_of_program(tl.program_id(0), tiles, batch_heads, head_group)
    b = bh // heads
    h = bh % heads
    if HAS_MASK:
        TILES_A_BLOCK: tl.constexpr = (Q_BLOCK + BLOCK_M - 1) // BLOCK_M
        block = tile // TILES_A_BLOCK
        first_row = block * Q_BLOCK + (tile % TILES_A_BLOCK) * BLOCK_M
        end_row = tl.minimum((block + 1) * Q_BLOCK, q_length)
        run, last_run = mask_row(offsets, mask_strides, b, h, block)
    else:
        first_row = tile * BLOCK_M
        end_row = q_length
        run = 0
        last_run = 1
    if first_row >= end_row:
        return
    kv_head = h // GROUP
    kv_b = 0 * b if KV_SHARED else b
    rows = first_row + tl.arange(0, BLOCK_M)
    q_base = tensor_at(query, q_strides, b, h, UNITS[0])
    if DESCRIBED:
        k_base = 0
        v_base = 0
    else:
        k_base = tensor_at(key, k_strides, kv_b, kv_head, UNITS[1])
        v_base = tensor_at(value, v_strides, kv_b, kv_head, UNITS[2])
    first_key = (kv_b * (heads // GROUP) + kv_head) * kv_length
    do_base = tensor_at(dout, do_strides, b, h, UNITS[3])
    q = load_rows(q_base, q_strides, rows, end_row, DIM, D, UNITS[0], SCATTERED[0], WIDE, True)
    do = load_rows(
        do_base, do_strides, rows, end_row, VALUE_DIM, DV, UNITS[3], SCATTERED[3], WIDE, True
    )
    lse2, d = row_values(lse, delta, bh.to(tl.int64) * q_length, rows, end_row)
    mod_b = b + shifts[0]
    mod_h = h + shifts[1]
    q_idx = tl.minimum(rows, q_length - 1)[:, None] + shifts[2]
    row_live = (lse2 != float("inf"))[:, None]
    columns = tl.arange(0, BLOCK_N)
    dq_sum = tl.zeros([BLOCK_M, D], tl.float32)
    # Rows past the end, and rows without a live key, are dead pairs.
    rows_whole = first_row + BLOCK_M <= end_row

    for r in range(run, last_run):
        if HAS_MASK:
            begin, end, full = bounded_run(runs, r, KV_BLOCK, kv_length)
            steps = tl.where(full & rows_whole, (end - begin) // BLOCK_N, 0)
        else:
            begin = 0
            steps = tl.where(rows_whole, kv_length // BLOCK_N, 0)
        for step in range(steps):
            first = begin + step * BLOCK_N
            keys = first + columns
            k = load_tile(
                key, k_base, k_strides, first_key, first, columns, 0, DIM, D, UNITS[1],
                SCATTERED[1], WIDE, False, DESCRIBED,
            )
            v = load_tile(
                value, v_base, v_strides, first_key, first, columns, 0, VALUE_DIM, DV, UNITS[2],
                SCATTERED[2], WIDE, False, DESCRIBED,
            )
            _, grad = gradient_of_scores(
                q, k, do, v, None, lse2[:, None], d[:, None], mod_b, mod_h, q_idx,
                keys[None, :] + shifts[3], tables, ints, floats, totals, scale, SCORE_MOD,
                SCORE_MOD_BACKWARD, CAPTURED_GRADIENTS, PRECISION, False,
            )
            if WANT_DQ:
                dq_sum = tl.dot(grad.to(k.dtype), k, dq_sum, input_precision=PRECISION)

    for r in range(run, last_run):
        if HAS_MASK:
            begin, end, full = bounded_run(runs, r, KV_BLOCK, kv_length)
            whole = full & rows_whole
            begin = tl.where(whole, begin + (end - begin) // BLOCK_N * BLOCK_N, begin)
        else:
            begin = tl.where(rows_whole, kv_length // BLOCK_N * BLOCK_N, 0)
            end = kv_length
            full = True
        for first in range(begin, end, BLOCK_N):
            keys = first + columns
            k = load_tile(
                key, k_base, k_strides, first_key, first, columns, end, DIM, D, UNITS[1],
                SCATTERED[1], WIDE, True, DESCRIBED,
            )
            v = load_tile(
                value, v_base, v_strides, first_key, first, columns, end, VALUE_DIM, DV, UNITS[2],
                SCATTERED[2], WIDE, True, DESCRIBED,
            )
            kv_idx = tl.minimum(keys, kv_length - 1)[None, :] + shifts[3]
            live = (keys < end)[None, :] & row_live
            if MASK_MOD is not None:
                live = live & (full | MASK_MOD(mod_b, mod_h, q_idx, kv_idx, tables, ints, floats))
            _, grad = gradient_of_scores(
                q, k, do, v, live, lse2[:, None], d[:, None], mod_b, mod_h, q_idx, kv_idx, tables,
                ints, floats, totals, scale, SCORE_MOD, SCORE_MOD_BACKWARD, CAPTURED_GRADIENTS,
                PRECISION, False,
            )
            if WANT_DQ:
                # A key that isn't finite has NaN in its live pairs already.
                dq_sum = tl.dot(
                    grad.to(k.dtype), without_strange(k), dq_sum, input_precision=PRECISION
                )

    if WANT_DQ:
        base = tensor_at(dq, dq_strides, b, h, UNITS[4])
        store_rows(base, dq_strides, rows, end_row, dq_sum * scale, DIM, D, UNITS[4], WIDE)
