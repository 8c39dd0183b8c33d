"""Backward by query tiles, for dQ and gradients of captured tensors."""

from __future__ import annotations

import triton
import triton.language as tl

from anyflex_triton.backward import gradient_of_scores
from anyflex_triton.column_parts import (
    add_products,
    any_nonfinite,
    finite_parts,
    load_pointed_rows,
    load_step_rows,
    store_parts,
    zeros_of_parts,
)
from anyflex_triton.dependent_launch import await_earlier
from anyflex_triton.dropout import of_rows, with_seed
from anyflex_triton.forward import tile_of_program
from anyflex_triton.kernel_records import ModGradients, ModInputs, Mods, RowLayouts, RowValues
from anyflex_triton.tiles import (
    FEW,
    bounded_run,
    first_other_step,
    indices,
    long_steps,
    mask_row,
    next_other_step,
    place_of_tile,
    rows_by_pointers,
    rows_of_steps,
)

__all__ = ["add_to_queries", "query_kernel"]

# Argument lists would be a line an argument.
# fmt: off


@triton.jit
def add_to_queries(
    dq_sum, keys, values, q, do, row_values, inputs, mods, gradients, first, columns, end,
    kv_length, masked, full, WANT_DQ: tl.constexpr, BOUND: tl.constexpr, CAREFUL: tl.constexpr,
):
    """Return dQ after the keys from `first` on are added.

    Args:
        keys, values: `HeadRows`. row_values: `RowValues` [M].
        masked, full: arguments of `masked_scores`.
        BOUND: some keys may be past `end`.
        CAREFUL: argument of `gradient_of_scores`.
    """
    tables = inputs.tables
    places = first + columns
    k = load_step_rows(keys, first, columns, end, BOUND)
    v = load_step_rows(values, first, columns, end, BOUND)
    kv_idx = indices(
        first, columns, kv_length, mods.shifts[3], BOUND, mods.SCORE_MOD is not None,
    )
    inside = (places < end)[None, :] if BOUND else None
    if mods.READ is not None:
        tables = mods.READ(inputs.b, inputs.h, kv_idx, tables, mods.ints, mods.floats)
    _weights, grad = gradient_of_scores(
        q, k, do, v, masked, inside, full,
        RowValues(
            lse2=row_values.lse2[:, None], delta=row_values.delta[:, None],
            row_max=row_values.row_max[:, None], size=row_values.size[:, None],
        ),
        ModInputs(
            b=inputs.b, h=inputs.h, q_idx=inputs.q_idx, kv_idx=kv_idx[None, :], tables=tables,
            dropout=inputs.dropout,
        ),
        mods, gradients, keys.PRECISION, False, CAREFUL,
    )
    if CAREFUL:
        # A non-finite key has made its live pairs NaN already.
        k = finite_parts(k)
    if WANT_DQ:
        dq_sum = add_products(dq_sum, grad.to(k[0].dtype), k, keys.PRECISION)
    return dq_sum


@triton.jit
def query_kernel(
    query, key, value, dout, row_values, key_rows, value_rows, dq, offsets, ends, runs, q_strides,
    k_strides, v_strides, do_strides, dq_strides, mask_strides, tables, ints, floats, shifts,
    totals, scale, dropout, batch_heads, heads, values_of_head, values_in_all, q_length, kv_length,
    tiles, head_group,
    READ_ROWS: tl.constexpr, READ_COLUMNS: tl.constexpr, SCORE_MOD: tl.constexpr,
    SCORE_MOD_BACKWARD: tl.constexpr, CAPTURED_GRADIENTS: tl.constexpr, MASK_MOD: tl.constexpr,
    HAS_MASK: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    KV_SHARED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, UNITS: tl.constexpr, SCATTERED: tl.constexpr, WIDE: tl.constexpr,
    WANT_DQ: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr, BESIDE: tl.constexpr,
    EVEN: tl.constexpr,
    FOLLOWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Compute dQ and gradients of captured tensors; one program per query tile, as in forward. Its
    loops step over key and value.
    """
    tile, bh = tile_of_program(tl.program_id(0), tiles, batch_heads, head_group)
    b = bh // heads
    h = bh % heads
    block, first_row, end_row = place_of_tile(tile, q_length, Q_BLOCK, BLOCK_M, HAS_MASK)
    run, last_run = mask_row(offsets, ends, mask_strides, b, h, block, HAS_MASK)
    if DIM > D and not HAS_MASK:
        # This number is always 1, which ptxas mustn't know where sums have parts: outside of
        # another loop products would wait for each other (C7515).
        last_run = tl.minimum(tiles, 1)
    if first_row >= end_row:
        return
    kv_head = h // GROUP
    kv_b = 0 * b if KV_SHARED else b
    rows = first_row + tl.arange(0, BLOCK_M)
    layouts = RowLayouts(UNITS=UNITS, SCATTERED=SCATTERED, WIDE=WIDE, PRECISION=PRECISION)
    queries = rows_by_pointers(query, q_strides, b, h, layouts, 0, DIM, D)
    keys = rows_of_steps(
        key, k_strides, kv_b, kv_head, heads // GROUP, kv_length, layouts, 1, DIM, D, BLOCK_N,
        DESCRIBED, BESIDE[0],
    )
    values = rows_of_steps(
        value, v_strides, kv_b, kv_head, heads // GROUP, kv_length, layouts, 2, VALUE_DIM, DV,
        BLOCK_N, DESCRIBED, BESIDE[1],
    )
    douts = rows_by_pointers(dout, do_strides, b, h, layouts, 3, VALUE_DIM, DV)
    q = load_pointed_rows(queries, rows, end_row)
    do = load_pointed_rows(douts, rows, end_row)
    at = bh.to(tl.int64) * values_of_head + rows
    lse2 = tl.load(row_values + at, mask=rows < end_row, other=float("inf"))
    delta = tl.load(row_values + 3 * values_in_all + at, mask=rows < end_row, other=0.0)
    values_of_rows = RowValues(lse2=lse2, delta=delta, row_max=delta, size=delta)
    mod_b = b + shifts[0]
    mod_h = h + shifts[1]
    q_idx = tl.minimum(rows, q_length - 1)[:, None] + shifts[2]
    if READ_ROWS is not None:
        tables = READ_ROWS(mod_b, mod_h, q_idx, tables, ints, floats)
    dropped = None
    if dropout is not None:
        dropped = of_rows(with_seed(dropout), mod_b, mod_h, q_idx)
    inputs = ModInputs(
        b=mod_b, h=mod_h, q_idx=q_idx, kv_idx=None, tables=tables, dropout=dropped,
    )
    mods = Mods(
        ints=ints, floats=floats, shifts=shifts, scale=scale, READ=READ_COLUMNS,
        SCORE_MOD=SCORE_MOD, MASK_MOD=MASK_MOD,
    )
    gradients = ModGradients(
        totals=totals, SCORE_MOD_BACKWARD=SCORE_MOD_BACKWARD,
        CAPTURED_GRADIENTS=CAPTURED_GRADIENTS,
    )
    columns = tl.arange(0, BLOCK_N)
    dq_sum = zeros_of_parts(BLOCK_M, DIM, D)

    others = 0
    # This loop runs long FULL runs except for their last step: no pair is dead.
    for r in range(run, last_run):
        begin, run_end, run_full = bounded_run(runs, r, KV_BLOCK, kv_length, HAS_MASK)
        steps = long_steps(begin, run_end, run_full, BLOCK_N)
        others += (run_end - begin + BLOCK_N - 1) // BLOCK_N - steps
        for step in range(steps):
            dq_sum = add_to_queries(
                dq_sum, keys, values, q, do, values_of_rows, inputs, mods, gradients,
                begin + step * BLOCK_N, columns, 0, kv_length, None, True, WANT_DQ, False, False,
            )

    # One loop takes PARTIAL runs and the rest of the others, because each loop begins with a wait.
    # Its steps were counted above, and `_once` is no `if`: otherwise ptxas makes products wait for
    # each other (C7515), and Triton fails to compile forward for Blackwell.
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
                dq_sum, keys, values, q, do, values_of_rows, inputs, mods, gradients, first,
                columns, end, kv_length, masked, mask_full, WANT_DQ, not EVEN, False,
            )
            r, first, end, full = next_other_step(
                runs, r, last_run, first, end, full, KV_BLOCK, kv_length, BLOCK_N, HAS_MASK,
            )

    # A non-finite key has reached rows that don't see it, because 0 * NaN is NaN. Far rows are
    # still to be computed. All steps run again, a few keys each (`FEW`).
    inexact = any_nonfinite(dq_sum) | (lse2 != lse2).to(tl.int32)
    if tl.max(inexact, 0) > 0:
        careful = row_values + values_in_all + at
        careful_values = RowValues(
            lse2=lse2, delta=delta, row_max=tl.load(careful, mask=rows < end_row, other=0.0),
            size=tl.load(careful + values_in_all, mask=rows < end_row, other=float("inf")),
        )
        dq_sum = zeros_of_parts(BLOCK_M, DIM, D)
        few = tl.arange(0, FEW)
        k_rows = rows_by_pointers(key_rows, k_strides, kv_b, kv_head, layouts, 1, DIM, D)
        v_rows = rows_by_pointers(value_rows, v_strides, kv_b, kv_head, layouts, 2, VALUE_DIM, DV)
        for r in range(run, last_run):
            begin, end, full = bounded_run(runs, r, KV_BLOCK, kv_length, HAS_MASK)
            for first in tl.range(begin, end, FEW, num_stages=1):
                dq_sum = add_to_queries(
                    dq_sum, k_rows, v_rows, q, do, careful_values, inputs, mods, gradients, first,
                    few, end, kv_length, True, full, WANT_DQ, True, True,
                )

    if WANT_DQ:
        dq_rows = rows_by_pointers(dq, dq_strides, b, h, layouts, 4, DIM, D)
        store_parts(dq_rows, rows, end_row, dq_sum, scale)
    if FOLLOWS:
        # This program reads nothing more; it waits so that its end implies the end of keys'
        # launch.
        await_earlier()
