"""dQ and the gradients of captured tensors: a program takes a query tile, as in forward."""

from __future__ import annotations

import triton
import triton.language as tl

from anyflex_triton.backward import gradient_of_scores
from anyflex_triton.column_parts import (
    add_products,
    any_strange,
    finite_parts,
    load_parts,
    load_row_parts,
    store_parts,
    zeros_of_parts,
)
from anyflex_triton.dependent_launch import await_earlier
from anyflex_triton.forward import tile_of_program
from anyflex_triton.tiles import (
    FEW,
    bounded_run,
    first_other_step,
    head_at,
    indices,
    long_steps,
    mask_row,
    next_other_step,
    tensor_at,
)

__all__ = ["query_kernel"]

# Argument lists would be a line an argument.
# fmt: off


@triton.jit
def add_to_queries(
    dq_sum, key, value, k_base, v_base, k_strides, v_strides, q, do, lse2, d, top, size, first,
    columns, end, kv_length, masked, full, b, h, q_idx, shifts, tables, ints, floats, totals,
    scale, READ_COLUMNS: tl.constexpr, SCORE_MOD: tl.constexpr, SCORE_MOD_BACKWARD: tl.constexpr,
    CAPTURED_GRADIENTS: tl.constexpr, MASK_MOD: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, UNITS: tl.constexpr,
    SCATTERED: tl.constexpr, WIDE: tl.constexpr, WANT_DQ: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr, BOUND: tl.constexpr, CAREFUL: tl.constexpr,
):
    """dQ with what the keys from `first` on add.

    Args:
        masked, full: as in `masked_scores`.
        BOUND: whether keys past `end` are there.
        lse2, d, top, size, CAREFUL: as in `gradient_of_scores`.
    """
    keys = first + columns
    k = load_parts(
        key, k_base, k_strides, first, columns, end, DIM, D, UNITS[1], SCATTERED[1], WIDE, BOUND,
        DESCRIBED,
    )
    v = load_parts(
        value, v_base, v_strides, first, columns, end, VALUE_DIM, DV, UNITS[2], SCATTERED[2], WIDE,
        BOUND, DESCRIBED,
    )
    kv_idx = indices(first, columns, kv_length, shifts[3], BOUND, SCORE_MOD is not None)
    inside = (keys < end)[None, :] if BOUND else None
    if READ_COLUMNS is not None:
        tables = READ_COLUMNS(b, h, kv_idx, tables, ints, floats)
    _weights, grad = gradient_of_scores(
        q, k, do, v, masked, inside, full, lse2[:, None], d[:, None], top[:, None],
        size[:, None], b, h, q_idx, kv_idx[None, :], tables, ints, floats, totals, scale,
        SCORE_MOD, SCORE_MOD_BACKWARD, CAPTURED_GRADIENTS, MASK_MOD, PRECISION, False, CAREFUL,
    )
    if CAREFUL:
        # A key that isn't finite has NaN in its live pairs already.
        k = finite_parts(k)
    if WANT_DQ:
        dq_sum = add_products(dq_sum, grad.to(k[0].dtype), k, PRECISION)
    return dq_sum


@triton.jit
def query_kernel(
    query, key, value, dout, row_values, key_rows, value_rows, dq, offsets, ends, runs, q_strides,
    k_strides, v_strides, do_strides, dq_strides, mask_strides, tables, ints, floats, shifts,
    totals, scale, batch_heads, heads, values_of_head, values_in_all, q_length, kv_length, tiles,
    head_group, READ_ROWS: tl.constexpr, READ_COLUMNS: tl.constexpr, SCORE_MOD: tl.constexpr,
    SCORE_MOD_BACKWARD: tl.constexpr, CAPTURED_GRADIENTS: tl.constexpr, MASK_MOD: tl.constexpr,
    HAS_MASK: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    KV_SHARED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, UNITS: tl.constexpr, SCATTERED: tl.constexpr, WIDE: tl.constexpr,
    WANT_DQ: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr, BESIDE: tl.constexpr,
    EVEN: tl.constexpr,
    FOLLOWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """dQ, and the gradients of captured tensors: one program a query tile, as in forward.

    Args:
        D, DV: columns of a part (`column_parts`).
        row_values: of `row_kernel`, [4, values_in_all].
        key_rows, value_rows: key and value by pointers, whatever DESCRIBED says.
        DESCRIBED, BESIDE: as in `forward_kernel`.
        totals: accumulators of the captured tensors that learn, added to atomically.
        FOLLOWS: it may begin before the launch before it ends, which is `key_kernel`'s, all of
            whose programs have waited, so that row values are there.
    """
    tile, bh = tile_of_program(tl.program_id(0), tiles, batch_heads, head_group)
    b = bh // heads
    h = bh % heads
    if HAS_MASK:
        TILES_A_BLOCK: tl.constexpr = (Q_BLOCK + BLOCK_M - 1) // BLOCK_M
        block = tile // TILES_A_BLOCK
        first_row = block * Q_BLOCK + (tile % TILES_A_BLOCK) * BLOCK_M
        end_row = tl.minimum((block + 1) * Q_BLOCK, q_length)
        run, last_run = mask_row(offsets, ends, mask_strides, b, h, block)
    else:
        first_row = tile * BLOCK_M
        end_row = q_length
        run = 0
        # Always 1, which ptxas mustn't know where sums have parts: outside of another loop
        # products would wait for each other (C7515).
        last_run = tl.minimum(tiles, 1) if DIM > D else 1
    if first_row >= end_row:
        return
    kv_head = h // GROUP
    kv_b = 0 * b if KV_SHARED else b
    rows = first_row + tl.arange(0, BLOCK_M)
    q_base = tensor_at(query, q_strides, b, h, UNITS[0])
    k_base = head_at(
        key, k_strides, kv_b, kv_head, heads // GROUP, kv_length, UNITS[1], DESCRIBED, BESIDE[0],
    )
    v_base = head_at(
        value, v_strides, kv_b, kv_head, heads // GROUP, kv_length, UNITS[2], DESCRIBED, BESIDE[1],
    )
    if DESCRIBED == "kernel":
        key = tl.make_tensor_descriptor(
            k_base, [kv_length, DIM], [k_strides[2] * UNITS[1], 1], [BLOCK_N, D]
        )
        value = tl.make_tensor_descriptor(
            v_base, [kv_length, VALUE_DIM], [v_strides[2] * UNITS[2], 1], [BLOCK_N, DV]
        )
    do_base = tensor_at(dout, do_strides, b, h, UNITS[3])
    q = load_row_parts(q_base, q_strides, rows, end_row, DIM, D, UNITS[0], SCATTERED[0], WIDE)
    do = load_row_parts(
        do_base, do_strides, rows, end_row, VALUE_DIM, DV, UNITS[3], SCATTERED[3], WIDE
    )
    at = bh.to(tl.int64) * values_of_head + rows
    lse2 = tl.load(row_values + at, mask=rows < end_row, other=float("inf"))
    d = tl.load(row_values + 3 * values_in_all + at, mask=rows < end_row, other=0.0)
    mod_b = b + shifts[0]
    mod_h = h + shifts[1]
    q_idx = tl.minimum(rows, q_length - 1)[:, None] + shifts[2]
    if READ_ROWS is not None:
        tables = READ_ROWS(mod_b, mod_h, q_idx, tables, ints, floats)
    columns = tl.arange(0, BLOCK_N)
    dq_sum = zeros_of_parts(BLOCK_M, DIM, D)

    others = 0
    # Long FULL runs but for their last step: no pair is dead.
    for r in range(run, last_run):
        begin, run_end, run_full = bounded_run(runs, r, KV_BLOCK, kv_length, HAS_MASK)
        steps = long_steps(begin, run_end, run_full, BLOCK_N)
        others += (run_end - begin + BLOCK_N - 1) // BLOCK_N - steps
        for step in range(steps):
            dq_sum = add_to_queries(
                dq_sum, key, value, k_base, v_base, k_strides, v_strides, q, do, lse2, d, d, d,
                begin + step * BLOCK_N, columns, 0, kv_length, None, True, mod_b, mod_h, q_idx,
                shifts, tables, ints, floats, totals, scale, READ_COLUMNS, SCORE_MOD,
                SCORE_MOD_BACKWARD, CAPTURED_GRADIENTS, MASK_MOD, DIM, VALUE_DIM, D, DV, UNITS,
                SCATTERED, WIDE, WANT_DQ, PRECISION, DESCRIBED, False, False,
            )

    # PARTIAL runs, and the rest of the others, in one loop, for each begins with a wait. Their
    # steps were counted above, and `_once` is no `if`: else ptxas makes products wait for each
    # other (C7515), and Triton fails to compile forward for Blackwell.
    r = run
    first, end, full = first_other_step(
        runs, run, last_run, KV_BLOCK, kv_length, BLOCK_N, HAS_MASK,
    )
    for _once in range(tl.minimum(others, 1)):
        for _step in range(others):
            mask_full = full
            if EVEN:
                masked = None if MASK_MOD is None else not full
                mask_full = None
            else:
                masked = (not full) | (first + BLOCK_N > end)
            dq_sum = add_to_queries(
                dq_sum, key, value, k_base, v_base, k_strides, v_strides, q, do, lse2, d, d, d,
                first, columns, end, kv_length, masked, mask_full, mod_b, mod_h, q_idx, shifts,
                tables, ints, floats, totals, scale, READ_COLUMNS, SCORE_MOD, SCORE_MOD_BACKWARD,
                CAPTURED_GRADIENTS, MASK_MOD, DIM, VALUE_DIM, D, DV, UNITS, SCATTERED, WIDE,
                WANT_DQ, PRECISION, DESCRIBED, not EVEN, False,
            )
            r, first, end, full = next_other_step(
                runs, r, last_run, first, end, full, KV_BLOCK, kv_length, BLOCK_N, HAS_MASK,
            )

    # What isn't finite has reached rows that don't see its key: 0 * NaN is NaN. Far rows have yet
    # to be computed. All steps again, a few keys each (`FEW`).
    odd = any_strange(dq_sum) | (lse2 != lse2).to(tl.int32)
    if tl.max(odd, 0) > 0:
        careful = row_values + values_in_all + at
        top = tl.load(careful, mask=rows < end_row, other=0.0)
        size = tl.load(careful + values_in_all, mask=rows < end_row, other=float("inf"))
        dq_sum = zeros_of_parts(BLOCK_M, DIM, D)
        few = tl.arange(0, FEW)
        k_rows = tensor_at(key_rows, k_strides, kv_b, kv_head, UNITS[1])
        v_rows = tensor_at(value_rows, v_strides, kv_b, kv_head, UNITS[2])
        for r in range(run, last_run):
            begin, end, full = bounded_run(runs, r, KV_BLOCK, kv_length, HAS_MASK)
            for first in tl.range(begin, end, FEW, num_stages=1):
                dq_sum = add_to_queries(
                    dq_sum, key_rows, value_rows, k_rows, v_rows, k_strides, v_strides, q, do,
                    lse2, d, top, size, first, few, end, kv_length, True, full, mod_b, mod_h,
                    q_idx, shifts, tables, ints, floats, totals, scale, READ_COLUMNS, SCORE_MOD,
                    SCORE_MOD_BACKWARD, CAPTURED_GRADIENTS, MASK_MOD, DIM, VALUE_DIM, D, DV, UNITS,
                    SCATTERED, WIDE, WANT_DQ, PRECISION, None, True, True,
                )

    if WANT_DQ:
        base = tensor_at(dq, dq_strides, b, h, UNITS[4])
        store_parts(base, dq_strides, rows, end_row, dq_sum, scale, DIM, D, UNITS[4], WIDE)
    if FOLLOWS:
        # Nothing is read any more: its end says that keys' launch has ended too.
        await_earlier()
