"""Backward by key tiles, for dK and dV: a program steps over the query rows that see its keys.

Where a KV head has many query heads and there are few tiles, splits of these query heads have
programs of their own, and `sum_kernel` adds up their float32 sums in a fixed order.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from anyflex_triton.backward import gradient_of_scores
from anyflex_triton.column_parts import (
    add_products,
    any_nonfinite,
    chosen_rows,
    finite_parts,
    load_pointed_rows,
    load_step_rows,
    store_parts,
    zeros_of_parts,
)
from anyflex_triton.dependent_launch import await_earlier, let_next_begin
from anyflex_triton.dropout import of_rows, with_seed
from anyflex_triton.forward import tile_of_program
from anyflex_triton.kernel_records import ModGradients, ModInputs, Mods, RowLayouts, RowValues
from anyflex_triton.records import record
from anyflex_triton.tiles import (
    FEW,
    bounded_run,
    first_other_step,
    indices,
    long_steps,
    mask_row,
    next_other_step,
    nonfinite,
    place_of_tile,
    rows_by_pointers,
    rows_of_steps,
    store_rows,
    tensor_at,
)

__all__ = ["HeadRowValues", "add_to_keys", "key_kernel", "sum_kernel"]


@record
class HeadRowValues:
    """Row values of one head, from `backward.row_kernel`.

    Attributes:
        tensor: a pointer, or a descriptor where DESCRIBED is "host". Past a head's end the
            descriptor gives other rows' values.
        first: offset of this head's lse2.
        values_in_all: values of all heads, which is the distance to the next kind of values.
    """

    tensor: Any
    first: Any
    values_in_all: Any
    DESCRIBED: Any


# Argument lists would be a line an argument.
# fmt: off

TOGETHER = tl.constexpr(4)
"""Number of splits that `sum_kernel` loads at a time, before it adds them in order."""


@triton.jit
def load_row_values(row_values, at, first, rows, end, BOUND: tl.constexpr):
    """Load values [M] of `row_kernel` for the query rows first + rows.

    Args:
        row_values: `HeadRowValues`.
        at: offset of this head's values of a kind.
    """
    tensor = row_values.tensor
    if row_values.DESCRIBED == "host":
        return row_values.tensor.load([(at + first).to(tl.int32)])
    elif BOUND:
        return tl.load(tensor + at + first + rows, mask=first + rows < end, other=0.0)
    else:
        return tl.load(tensor + at + first + rows)


@triton.jit
def add_to_keys(
    dk_sum, dv_sum, queries, douts, row_values, k, v, inputs, mods, gradients, first, rows_of_tile,
    end, q_length, masked, full, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
    BOUND: tl.constexpr, CAREFUL: tl.constexpr,
):
    """Return dK and dV after the query rows from `first` on are added.

    Args:
        queries, douts: `HeadRows`. row_values: `HeadRowValues`.
        masked, full: arguments of `masked_scores`.
        BOUND: some rows may be past `end`.
        CAREFUL: argument of `gradient_of_scores`.
    """
    tables = inputs.tables
    rows = first + rows_of_tile
    q = load_step_rows(queries, first, rows_of_tile, end, BOUND)
    do = load_step_rows(douts, first, rows_of_tile, end, BOUND)
    kind = row_values.values_in_all
    lse2 = load_row_values(row_values, row_values.first, first, rows_of_tile, end, BOUND)
    if WANT_DK:
        at = row_values.first + 3 * kind
        delta = load_row_values(row_values, at, first, rows_of_tile, end, BOUND)
    else:
        # A placeholder: no result depends on it.
        delta = lse2
    row_max = lse2
    size = lse2
    if CAREFUL:
        careful = row_values.first + kind
        row_max = load_row_values(row_values, careful, first, rows_of_tile, end, BOUND)
        size = load_row_values(row_values, careful + kind, first, rows_of_tile, end, BOUND)
    q_idx = indices(
        first, rows_of_tile, q_length, mods.shifts[2], BOUND, mods.SCORE_MOD is not None,
    )
    inside = (rows < end)[None, :] if BOUND else None
    if mods.READ is not None:
        tables = mods.READ(inputs.b, inputs.h, q_idx, tables, mods.ints, mods.floats)
    dropped = None
    if inputs.dropout is not None:
        dropped = of_rows(inputs.dropout, inputs.b, inputs.h, q_idx[None, :])
    weights, grad = gradient_of_scores(
        q, k, do, v, masked, inside, full,
        RowValues(
            lse2=lse2[None, :], delta=delta[None, :], row_max=row_max[None, :],
            size=size[None, :],
        ),
        ModInputs(
            b=inputs.b, h=inputs.h, q_idx=q_idx[None, :], kv_idx=inputs.kv_idx, tables=tables,
            dropout=dropped,
        ),
        mods, gradients, queries.PRECISION, True, CAREFUL,
    )
    if CAREFUL:
        # A non-finite query has made its live pairs NaN already; a non-finite dout does reach all
        # keys, unless no key is live.
        q = finite_parts(q)
        alive = (rows < end) & (lse2 != float("inf"))
        do = chosen_rows(alive, do)
    if WANT_DV:
        dv_sum = add_products(dv_sum, weights.to(do[0].dtype), do, queries.PRECISION)
    if WANT_DK:
        dk_sum = add_products(dk_sum, grad.to(q[0].dtype), q, queries.PRECISION)
    return dk_sum, dv_sum


@triton.jit
def key_kernel(
    query, key, value, dout, row_values, query_rows, dout_rows, values_by_row, dk, dv, key_sums,
    offsets, ends, runs, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    mask_strides, tables, ints, floats, shifts, scale, dropout, batch, heads, values_of_head,
    values_in_all, kv_batch_heads, kv_heads, q_length, kv_length, tiles, head_group, head_splits,
    split_heads, READ_ROWS: tl.constexpr, READ_COLUMNS: tl.constexpr, SCORE_MOD: tl.constexpr,
    SCORE_MOD_BACKWARD: tl.constexpr, MASK_MOD: tl.constexpr, HAS_MASK: tl.constexpr,
    Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, GROUP: tl.constexpr, KV_SHARED: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    UNITS: tl.constexpr, SCATTERED: tl.constexpr, WIDE: tl.constexpr, WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr, BESIDE: tl.constexpr,
    EVEN: tl.constexpr, LOOPED: tl.constexpr, FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Compute dK and dV; one program per tile of BLOCK_N keys of a KV head, over all rows that
    read it. Its loops step over query, dout and row_values; DESCRIBED, the kernel itself makes
    descriptors of the first two only.

    Args:
        key_sums: of `sum_kernel`, written instead of dk and dv where KV heads are split; else it
            and the numbers of splits are None.
        offsets, ends, runs: those of the transposed mask: its rows are key blocks, its runs count
            query blocks.
    """
    streams = GROUP * batch if KV_SHARED else GROUP
    first_stream = 0
    if key_sums is None:
        tile, unit = tile_of_program(tl.program_id(0), tiles, kv_batch_heads, head_group)
        kv_unit = unit
    else:
        tile, unit = tile_of_program(
            tl.program_id(0), tiles, kv_batch_heads * head_splits, head_group,
        )
        kv_unit = unit // head_splits
        first_stream = unit % head_splits * split_heads
        streams = tl.minimum(first_stream + split_heads, streams)
    # Under causal masks most queries see the first keys.
    tile = tiles - 1 - tile
    kv_b = kv_unit // kv_heads
    kv_head = kv_unit % kv_heads
    block, first_key, end_key = place_of_tile(tile, kv_length, KV_BLOCK, BLOCK_N, HAS_MASK)
    if first_key >= end_key:
        return
    keys = first_key + tl.arange(0, BLOCK_N)
    layouts = RowLayouts(UNITS=UNITS, SCATTERED=SCATTERED, WIDE=WIDE, PRECISION=PRECISION)
    k_rows = rows_by_pointers(key, k_strides, kv_b, kv_head, layouts, 1, DIM, D)
    v_rows = rows_by_pointers(value, v_strides, kv_b, kv_head, layouts, 2, VALUE_DIM, DV)
    k = load_pointed_rows(k_rows, keys, end_key)
    v = load_pointed_rows(v_rows, keys, end_key)
    kv_idx = tl.minimum(keys, kv_length - 1)[:, None] + shifts[3]
    mods = Mods(
        ints=ints, floats=floats, shifts=shifts, scale=scale, READ=READ_ROWS, SCORE_MOD=SCORE_MOD,
        MASK_MOD=MASK_MOD,
    )
    gradients = ModGradients(
        totals=None, SCORE_MOD_BACKWARD=SCORE_MOD_BACKWARD, CAPTURED_GRADIENTS=None,
    )
    dropped = None
    if dropout is not None:
        dropped = with_seed(dropout)
    dk_sum = zeros_of_parts(BLOCK_N, DIM, D)
    dv_sum = zeros_of_parts(BLOCK_N, VALUE_DIM, DV)
    rows_of_tile = tl.arange(0, BLOCK_M)
    if FOLLOWS:
        # Keys and values were complete before the call's first launch; row values may not be yet.
        await_earlier()
    if LEADS:
        let_next_begin()

    if LOOPED:
        # Triton 3.6 fails to compile a loop that runs once for Blackwell.
        streams = tl.minimum(streams, batch * heads)
    for stream in range(first_stream, streams):
        b = stream // GROUP if KV_SHARED else kv_b
        h = kv_head * GROUP + stream % GROUP
        mod_b = b + shifts[0]
        mod_h = h + shifts[1]
        if READ_COLUMNS is not None:
            read = READ_COLUMNS(mod_b, mod_h, kv_idx, tables, ints, floats)
        else:
            read = tables
        queries = rows_of_steps(
            query, q_strides, b, h, heads, q_length, layouts, 0, DIM, D, BLOCK_M, DESCRIBED,
            BESIDE[0],
        )
        douts = rows_of_steps(
            dout, do_strides, b, h, heads, q_length, layouts, 3, VALUE_DIM, DV, BLOCK_M, DESCRIBED,
            BESIDE[1],
        )
        values = HeadRowValues(
            tensor=row_values, first=(b * heads + h).to(tl.int64) * values_of_head,
            values_in_all=values_in_all, DESCRIBED=DESCRIBED,
        )
        inputs = ModInputs(
            b=mod_b, h=mod_h, q_idx=None, kv_idx=kv_idx, tables=read, dropout=dropped,
        )
        run, last_run = mask_row(offsets, ends, mask_strides, b, h, block, HAS_MASK)

        others = 0
        # This loop runs long FULL runs except for their last step: no pair is dead.
        for r in range(run, last_run):
            begin, run_end, run_full = bounded_run(runs, r, Q_BLOCK, q_length, HAS_MASK)
            steps = long_steps(begin, run_end, run_full, BLOCK_M)
            others += (run_end - begin + BLOCK_M - 1) // BLOCK_M - steps
            for step in range(steps):
                dk_sum, dv_sum = add_to_keys(
                    dk_sum, dv_sum, queries, douts, values, k, v, inputs, mods, gradients,
                    begin + step * BLOCK_M, rows_of_tile, 0, q_length, None, True, WANT_DK,
                    WANT_DV, False, False,
                )

        # One loop takes PARTIAL runs and the rest of the others, because each loop begins with a
        # wait. Its steps were counted above, else ptxas makes products wait for each other
        # (C7515). The form that the other kernels have in place of this `if` would do the same
        # here.
        r = run
        first, end, full = first_other_step(
            runs, run, last_run, Q_BLOCK, q_length, BLOCK_M, HAS_MASK,
        )
        if others > 0:
            for _step in range(others):
                mask_full = full
                if EVEN:
                    masked = None if MASK_MOD is None else not full
                    mask_full = None
                else:
                    masked = (not full) | (first + BLOCK_M > end)
                dk_sum, dv_sum = add_to_keys(
                    dk_sum, dv_sum, queries, douts, values, k, v, inputs, mods, gradients, first,
                    rows_of_tile, end, q_length, masked, mask_full, WANT_DK, WANT_DV, not EVEN,
                    False,
                )
                r, first, end, full = next_other_step(
                    runs, r, last_run, first, end, full, Q_BLOCK, q_length, BLOCK_M, HAS_MASK,
                )

    # Non-finite values and far rows have reached keys that their query doesn't see, because 0 *
    # NaN is NaN. All steps run again, a few rows each (`FEW`).
    nonfinite = tl.max(any_nonfinite(dk_sum), 0)
    if tl.maximum(nonfinite, tl.max(any_nonfinite(dv_sum), 0)) > 0:
        dk_sum = zeros_of_parts(BLOCK_N, DIM, D)
        dv_sum = zeros_of_parts(BLOCK_N, VALUE_DIM, DV)
        few = tl.arange(0, FEW)
        for stream in range(first_stream, streams):
            b = stream // GROUP if KV_SHARED else kv_b
            h = kv_head * GROUP + stream % GROUP
            mod_b = b + shifts[0]
            mod_h = h + shifts[1]
            if READ_COLUMNS is not None:
                read = READ_COLUMNS(mod_b, mod_h, kv_idx, tables, ints, floats)
            else:
                read = tables
            queries = rows_by_pointers(query_rows, q_strides, b, h, layouts, 0, DIM, D)
            douts = rows_by_pointers(dout_rows, do_strides, b, h, layouts, 3, VALUE_DIM, DV)
            values = HeadRowValues(
                tensor=values_by_row, first=(b * heads + h).to(tl.int64) * values_of_head,
                values_in_all=values_in_all, DESCRIBED=None,
            )
            inputs = ModInputs(
                b=mod_b, h=mod_h, q_idx=None, kv_idx=kv_idx, tables=read, dropout=dropped,
            )
            run, last_run = mask_row(offsets, ends, mask_strides, b, h, block, HAS_MASK)
            for r in range(run, last_run):
                begin, end, full = bounded_run(runs, r, Q_BLOCK, q_length, HAS_MASK)
                for first in tl.range(begin, end, FEW, num_stages=1):
                    dk_sum, dv_sum = add_to_keys(
                        dk_sum, dv_sum, queries, douts, values, k, v, inputs, mods, gradients,
                        first, few, end, q_length, True, full, WANT_DK, WANT_DV, True, True,
                    )

    if key_sums is not None:
        WIDTH: tl.constexpr = D * len(dk_sum) if WANT_DK else 0
        OF_VALUES: tl.constexpr = DV * len(dv_sum) if WANT_DV else 0
        rows = key_sums + (unit.to(tl.int64) * kv_length + keys) * (WIDTH + OF_VALUES)
        if WANT_DK:
            store_sums(rows, keys < end_key, dk_sum, D)
        if WANT_DV:
            store_sums(rows + WIDTH, keys < end_key, dv_sum, DV)
    else:
        if WANT_DV:
            dv_rows = rows_by_pointers(dv, dv_strides, kv_b, kv_head, layouts, 5, VALUE_DIM, DV)
            store_parts(dv_rows, keys, end_key, dv_sum, None)
        if WANT_DK:
            dk_rows = rows_by_pointers(dk, dk_strides, kv_b, kv_head, layouts, 4, DIM, D)
            store_parts(dk_rows, keys, end_key, dk_sum, scale)


@triton.jit
def store_sums(rows, inside, parts, COLUMNS: tl.constexpr):
    """Store float32 parts of COLUMNS columns, whose rows begin at the pointers `rows`."""
    for i in tl.static_range(len(parts)):
        columns = i * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(rows[:, None] + columns[None, :], parts[i], mask=inside[:, None])


@triton.jit
def sum_gradient(
    sums, of_split, inside, base, out_strides, rows, end, factor, splits, DIM: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Store the sums of all splits of some rows of a gradient, times `factor` unless that is None.
    Return int32: 1 if some sum is non-finite.

    Args:
        sums: pointers to the rows' first split, [rows]. of_split: distance to the next split.
    """
    odd = 0
    for first in tl.static_range(0, DIM, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        there = inside[:, None] & (columns < DIM)[None, :]
        found = tl.zeros([rows.shape[0], COLUMNS], tl.float32)
        for some in range(0, splits, TOGETHER):
            for i in tl.static_range(TOGETHER):
                places = sums + (some + i) * of_split
                found += tl.load(
                    places[:, None] + columns[None, :], mask=there & (some + i < splits),
                    other=0.0,
                )
        odd = tl.maximum(odd, tl.max(tl.max(nonfinite(found).to(tl.int32), 1), 0))
        if factor is not None:
            found *= factor
        store_rows(base, out_strides, rows, end, found, DIM, COLUMNS, UNIT, WIDE, first)
    return odd


@triton.jit
def sum_kernel(
    key_sums, dk, dv, odd_keys, dk_strides, dv_strides, scale, kv_heads, kv_length, padded_keys,
    head_splits, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    UNITS: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Add up dK and dV of each KV head's splits, from the first to the last: BLOCK_N keys per
    program.

    Args:
        key_sums: float32 [Bkv * Hkv, head_splits, padded_keys, D + DV]; columns of dK before its
            factor `scale`, then those of dV. D or DV is 0 where the gradient isn't wanted.
        odd_keys: int32, for every 64 keys, set to 1 where some sum is non-finite; or None.
    """
    blocks = tl.cdiv(padded_keys, BLOCK_N)
    unit = tl.program_id(0) // blocks
    keys = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = keys < kv_length
    of_split = padded_keys.to(tl.int64) * (D + DV)
    sums = key_sums + unit * head_splits * of_split + keys.to(tl.int64) * (D + DV)
    odd = 0
    if D > 0:
        base = tensor_at(dk, dk_strides, unit // kv_heads, unit % kv_heads, UNITS[0])
        odd = sum_gradient(
            sums, of_split, inside, base, dk_strides, keys, kv_length, scale, head_splits, DIM,
            UNITS[0], WIDE, 64 if D > 64 else D,
        )
    if DV > 0:
        base = tensor_at(dv, dv_strides, unit // kv_heads, unit % kv_heads, UNITS[1])
        odd = tl.maximum(odd, sum_gradient(
            sums + D, of_split, inside, base, dv_strides, keys, kv_length, None, head_splits,
            VALUE_DIM, UNITS[1], WIDE, 64 if DV > 64 else DV,
        ))
    if odd_keys is not None:
        at = odd_keys + tl.program_id(0) * BLOCK_N // 64
        tl.atomic_max(at, odd, mask=odd > 0, sem="relaxed")
