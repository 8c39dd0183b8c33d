"""Kernels before and after Hopper's backward, in plain Triton: row values, dQ from its sums,
repairs.

In Hopper's kernels non-finite values reach pairs that don't see them, because 0 * NaN is NaN; and
far rows, whose scores are huge (anyflex_triton/backward.py), give NaN. Such tiles of dQ, dK and dV
are computed again here, in the way of the portable kernels. A separate kernel does that because it
takes many registers, and the speed of the others depends on their occupancy.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from anyflex_cuda.kernel_records import MaskRuns
from anyflex_triton.device_functions import (
    DeltaSources,
    HeadRowValues,
    ModGradients,
    ModInputs,
    Mods,
    RowLayouts,
    RowValues,
    add_to_keys,
    add_to_queries,
    bounded_run,
    load_pointed_rows,
    mask_row,
    nonfinite,
    record,
    rows_by_pointers,
    store_parts,
    store_row_values,
    store_rows,
    tensor_at,
    zeros_of_parts,
)

__all__ = ["convert_kernel", "prepare_kernel", "repair_kernel"]


@record
class RepairCall:
    """Arguments of `repair_kernel` that `repair_queries` and `repair_keys` share.

    Attributes:
        mods, gradients, layouts: `Mods`, `ModGradients`, `RowLayouts`.
    """

    query: Any
    key: Any
    value: Any
    dout: Any
    row_values: Any
    q_strides: Any
    k_strides: Any
    v_strides: Any
    do_strides: Any
    tables: Any
    mods: Any
    gradients: Any
    heads: Any
    padded_length: Any
    values_in_all: Any
    q_length: Any
    kv_length: Any
    GROUP: Any
    KV_SHARED: Any
    DIM: Any
    VALUE_DIM: Any
    D: Any
    DV: Any
    layouts: Any


# Argument lists would be a line an argument.
# fmt: off


@triton.jit
def prepare_kernel(
    out, rest, tops, dout, lse, dlse, given, row_values, dq_sums, counter, o_strides, r_strides,
    do_strides, dl_strides, scale, heads, padded_length, values_in_all, q_length,
    VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, UNITS: tl.constexpr,
    SCATTERED: tl.constexpr, WIDE: tl.constexpr, SCORED: tl.constexpr, HAS_DLSE: tl.constexpr,
    IS_GIVEN: tl.constexpr, HAS_REST: tl.constexpr, WANT_DQ: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """Do what `anyflex_triton.backward.row_kernel` does, for padded rows, and set sums of dQ and
    counter to 0.

    Args:
        row_values: [4, B, Hq, padded_length]; rows past the last are written as rows without a
            live key.
        dq_sums: unused without WANT_DQ.
        padded_length: a multiple of BLOCK_M.
    """
    tiles = padded_length // BLOCK_M
    bh = tl.program_id(0) // tiles
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    value_at = bh.to(tl.int64) * padded_length + rows
    if tl.program_id(0) == 0:
        tl.store(counter, 0)
    if WANT_DQ:
        offsets = value_at[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(dq_sums + offsets, tl.zeros([BLOCK_M, D], tl.float32))
    sources = DeltaSources(
        out=out, rest=rest, dout=dout, dlse=dlse, given=given, o_strides=o_strides,
        r_strides=r_strides, do_strides=do_strides, dl_strides=dl_strides, VALUE_DIM=VALUE_DIM,
        DV=DV, UNITS=UNITS, SCATTERED=SCATTERED, WIDE=WIDE, HAS_DLSE=HAS_DLSE, IS_GIVEN=IS_GIVEN,
        HAS_REST=HAS_REST,
    )
    store_row_values(
        sources, lse, tops, row_values, bh, heads, rows, q_length, padded_length, values_in_all,
        None, scale, SCORED, True,
    )


@triton.jit
def summed_rows(dq_sums, D: tl.constexpr):
    """Return [64, D], the sums of 64 rows. At `dq_sums` they are in the order in which threads of
    `hopper_backward.add_step` hold them: each 64 columns as [128, 32], 4 elements a thread."""
    sums = tl.load(dq_sums + tl.arange(0, 64 * D))
    # Axes: columns by 64 and by 8; rows by 16, by 2 and by 1; columns by 2; rows by 8; columns.
    sums = tl.reshape(sums, [D // 64, 8, 4, 4, 2, 4, 2, 2])
    sums = tl.permute(sums, [2, 6, 3, 4, 0, 1, 5, 7])
    return tl.reshape(sums, [64, D])


@triton.jit
def convert_kernel(
    dq_sums, dq, row_values, odd_rows, dq_strides, scale, heads, padded_length, q_length,
    DIM: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
):
    """Convert the sums of dQ to dQ, 64 query rows per program.

    Args:
        row_values: written by `prepare_kernel`.
        odd_rows: int32 [B * Hq * padded_length / 64], written: 1 where some sum is non-finite or
            some row's lse2 is NaN, else 0. lse2 is tested too because sums are 0 where the score
            mod has no derivative by the score.
        padded_length: a multiple of 64.
    """
    index = tl.program_id(0)
    tiles = padded_length // 64
    bh = index // tiles
    first_row = index % tiles * 64
    sums = summed_rows(dq_sums + index.to(tl.int64) * (64 * D), D)
    lse2 = tl.load(row_values + index.to(tl.int64) * 64 + tl.arange(0, 64))
    inexact = tl.max(tl.max(nonfinite(sums).to(tl.int32), 1) | (lse2 != lse2).to(tl.int32), 0)
    # Tiles past the end have no rows to repair.
    tl.store(odd_rows + index, tl.where(first_row < q_length, inexact, 0))
    base = tensor_at(dq, dq_strides, bh // heads, bh % heads, UNIT)
    rows = first_row + tl.arange(0, 64)
    store_rows(base, dq_strides, rows, q_length, sums * scale, DIM, D, UNIT, WIDE)


@triton.jit
def repair_queries(index, call, mask, dq, dq_strides, BLOCK_N: tl.constexpr):
    """Compute dQ of a tile of 64 query rows, and add to captured tensors' gradients what its far
    rows contribute, which is still missing.

    Args:
        call, mask: `RepairCall` and `MaskRuns`.
    """
    mods = call.mods
    q_length = call.q_length
    tiles = call.padded_length // 64
    bh = index // tiles
    b = bh // call.heads
    h = bh % call.heads
    first_row = index % tiles * 64
    rows = first_row + tl.arange(0, 64)
    at = bh.to(tl.int64) * call.padded_length + rows
    kv_head = h // call.GROUP
    kv_b = 0 * b if call.KV_SHARED else b
    layouts = call.layouts
    queries = rows_by_pointers(call.query, call.q_strides, b, h, layouts, 0, call.DIM, call.D)
    keys = rows_by_pointers(call.key, call.k_strides, kv_b, kv_head, layouts, 1, call.DIM, call.D)
    values = rows_by_pointers(
        call.value, call.v_strides, kv_b, kv_head, layouts, 2, call.VALUE_DIM, call.DV,
    )
    douts = rows_by_pointers(
        call.dout, call.do_strides, b, h, layouts, 3, call.VALUE_DIM, call.DV,
    )
    q = load_pointed_rows(queries, rows, q_length)
    do = load_pointed_rows(douts, rows, q_length)
    row_values = RowValues(
        lse2=tl.load(call.row_values + at),
        delta=tl.load(call.row_values + 3 * call.values_in_all + at),
        row_max=tl.load(call.row_values + call.values_in_all + at),
        size=tl.load(call.row_values + 2 * call.values_in_all + at),
    )
    q_idx = tl.minimum(rows, q_length - 1)[:, None] + mods.shifts[2]
    columns = tl.arange(0, BLOCK_N)
    run, last_run = mask_row(
        mask.offsets, mask.ends, mask.strides, b, h, first_row // mask.Q_BLOCK,
        mask.HAS_MASK,
    )
    sums = zeros_of_parts(64, call.DIM, call.D)
    for r in range(run, last_run):
        begin, end, full = bounded_run(
            mask.runs, r, mask.KV_BLOCK, call.kv_length, mask.HAS_MASK,
        )
        for first in range(begin, end, BLOCK_N):
            inputs = ModInputs(
                b=b + mods.shifts[0], h=h + mods.shifts[1], q_idx=q_idx, kv_idx=None,
                tables=call.tables,
            )
            sums = add_to_queries(
                sums, keys, values, q, do, row_values, inputs, mods, call.gradients, first,
                columns, end, call.kv_length, True, full, True, True, True,
            )
    dq_rows = rows_by_pointers(dq, dq_strides, b, h, layouts, 4, call.DIM, call.D)
    store_parts(dq_rows, rows, q_length, sums, mods.scale)


@triton.jit
def repair_keys(
    index, call, mask, dk, dv, dk_strides, dv_strides, batch, kv_heads, padded_keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Compute dK and dV of a tile of BLOCK_N keys.

    Args:
        call: `RepairCall`. mask: `MaskRuns` of the transposed mask.
    """
    mods = call.mods
    # Only `repair_queries` adds to captured tensors' gradients.
    gradients = ModGradients(
        totals=None, SCORE_MOD_BACKWARD=call.gradients.SCORE_MOD_BACKWARD, CAPTURED_GRADIENTS=None,
    )
    kv_length = call.kv_length
    tiles = padded_keys // BLOCK_N
    unit = index // tiles
    first_key = index % tiles * BLOCK_N
    places = first_key + tl.arange(0, BLOCK_N)
    kv_b = unit // kv_heads
    kv_head = unit % kv_heads
    layouts = call.layouts
    keys = rows_by_pointers(call.key, call.k_strides, kv_b, kv_head, layouts, 1, call.DIM, call.D)
    values = rows_by_pointers(
        call.value, call.v_strides, kv_b, kv_head, layouts, 2, call.VALUE_DIM, call.DV,
    )
    k = load_pointed_rows(keys, places, kv_length)
    v = load_pointed_rows(values, places, kv_length)
    kv_idx = tl.minimum(places, kv_length - 1)[:, None] + mods.shifts[3]
    dk_sum = zeros_of_parts(BLOCK_N, call.DIM, call.D)
    dv_sum = zeros_of_parts(BLOCK_N, call.VALUE_DIM, call.DV)
    rows_of_tile = tl.arange(0, BLOCK_M)
    streams = call.GROUP * batch if call.KV_SHARED else call.GROUP
    for stream in range(streams):
        b = stream // call.GROUP if call.KV_SHARED else kv_b
        h = kv_head * call.GROUP + stream % call.GROUP
        queries = rows_by_pointers(call.query, call.q_strides, b, h, layouts, 0, call.DIM, call.D)
        douts = rows_by_pointers(
            call.dout, call.do_strides, b, h, layouts, 3, call.VALUE_DIM, call.DV,
        )
        row_values = HeadRowValues(
            tensor=call.row_values,
            first=(b * call.heads + h).to(tl.int64) * call.padded_length,
            values_in_all=call.values_in_all, DESCRIBED=None,
        )
        run, last_run = mask_row(
            mask.offsets, mask.ends, mask.strides, b, h, first_key // mask.KV_BLOCK,
            mask.HAS_MASK,
        )
        for r in range(run, last_run):
            begin, end, full = bounded_run(
                mask.runs, r, mask.Q_BLOCK, call.q_length, mask.HAS_MASK,
            )
            for first in range(begin, end, BLOCK_M):
                inputs = ModInputs(
                    b=b + mods.shifts[0], h=h + mods.shifts[1], q_idx=None, kv_idx=kv_idx,
                    tables=call.tables,
                )
                dk_sum, dv_sum = add_to_keys(
                    dk_sum, dv_sum, queries, douts, row_values, k, v, inputs, mods, gradients,
                    first, rows_of_tile, end, call.q_length, True, full, True, True, True, True,
                )
    dv_rows = rows_by_pointers(
        dv, dv_strides, kv_b, kv_head, layouts, 6, call.VALUE_DIM, call.DV,
    )
    store_parts(dv_rows, places, kv_length, dv_sum, None)
    dk_rows = rows_by_pointers(dk, dk_strides, kv_b, kv_head, layouts, 5, call.DIM, call.D)
    store_parts(dk_rows, places, kv_length, dk_sum, mods.scale)


@triton.jit
def repair_kernel(
    query, key, value, dout, row_values, dq, dk, dv, odd_rows, odd_keys, offsets, ends, runs,
    key_offsets, key_ends, key_runs, q_strides, k_strides, v_strides, do_strides, dq_strides,
    dk_strides, dv_strides, mask_strides, key_mask_strides, tables, ints, floats, totals, shifts,
    scale, batch, heads, kv_heads, padded_length, values_in_all, padded_keys, q_length, kv_length,
    row_tiles, key_tiles, row_programs, SCORE_MOD: tl.constexpr, SCORE_MOD_BACKWARD: tl.constexpr,
    CAPTURED_GRADIENTS: tl.constexpr, MASK_MOD: tl.constexpr, HAS_MASK: tl.constexpr,
    Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, GROUP: tl.constexpr, KV_SHARED: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    UNITS: tl.constexpr, SCATTERED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    WANT_DQ: tl.constexpr, TILES: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Compute dK, dV, and where WANT_DQ dQ, again where they are non-finite, and add what far rows
    contribute to captured tensors' gradients. Each program looks at TILES tiles.

    Args:
        row_values: written by `prepare_kernel`.
        odd_rows: written by `convert_kernel`.
    """
    call = RepairCall(
        query=query, key=key, value=value, dout=dout, row_values=row_values, q_strides=q_strides,
        k_strides=k_strides, v_strides=v_strides, do_strides=do_strides, tables=tables,
        mods=Mods(
            ints=ints, floats=floats, shifts=shifts, scale=scale, READ=None, SCORE_MOD=SCORE_MOD,
            MASK_MOD=MASK_MOD,
        ),
        gradients=ModGradients(
            totals=totals, SCORE_MOD_BACKWARD=SCORE_MOD_BACKWARD,
            CAPTURED_GRADIENTS=CAPTURED_GRADIENTS,
        ),
        heads=heads, padded_length=padded_length, values_in_all=values_in_all, q_length=q_length,
        kv_length=kv_length, GROUP=GROUP, KV_SHARED=KV_SHARED, DIM=DIM, VALUE_DIM=VALUE_DIM, D=D,
        DV=DV,
        layouts=RowLayouts(UNITS=UNITS, SCATTERED=SCATTERED, WIDE=WIDE, PRECISION=PRECISION),
    )
    index = tl.program_id(0)
    many = tl.arange(0, TILES)
    if WANT_DQ:
        if index < row_programs:
            mask = MaskRuns(
                offsets=offsets, ends=ends, runs=runs, strides=mask_strides, HAS_MASK=HAS_MASK,
                Q_BLOCK=Q_BLOCK, KV_BLOCK=KV_BLOCK,
            )
            first = index * TILES
            found = tl.load(odd_rows + first + many, mask=first + many < row_tiles, other=0)
            if tl.max(found, 0) > 0:
                for tile in range(first, tl.minimum(first + TILES, row_tiles)):
                    if tl.load(odd_rows + tile) > 0:
                        repair_queries(tile, call, mask, dq, dq_strides, BLOCK_N)
            return
        index -= row_programs
    key_mask = MaskRuns(
        offsets=key_offsets, ends=key_ends, runs=key_runs, strides=key_mask_strides,
        HAS_MASK=HAS_MASK, Q_BLOCK=Q_BLOCK, KV_BLOCK=KV_BLOCK,
    )
    first = index * TILES
    found = tl.load(odd_keys + first + many, mask=first + many < key_tiles, other=0)
    if tl.max(found, 0) > 0:
        for tile in range(first, tl.minimum(first + TILES, key_tiles)):
            if tl.load(odd_keys + tile) > 0:
                for part in range(64 // BLOCK_N):
                    repair_keys(
                        tile * (64 // BLOCK_N) + part, call, key_mask, dk, dv, dk_strides,
                        dv_strides, batch, kv_heads, padded_keys, 64, BLOCK_N,
                    )
