"""What runs before and after Hopper's backward, in plain Triton: rows' values, and dQ from its
sums.

What isn't finite reaches pairs that aren't seen there too: 0 * NaN is NaN. And far rows, whose
scores are huge (anyflex_triton/backward.py), give NaN. Tiles of dQ, dK and dV that came out so are
made again here, as the portable kernels make theirs: by a kernel of its own,
for it takes many registers, and the others are as quick as many programs at a time make them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyflex_triton.device_functions import (
    add_to_keys,
    add_to_queries,
    bounded_run,
    delta_of_rows,
    load_row_parts,
    mask_row,
    store_parts,
    store_rows,
    store_weighing,
    strange,
    tensor_at,
    zeros_of_parts,
)

__all__ = ["convert_kernel", "prepare_kernel", "repair_kernel"]

# Argument lists would be a line an argument.
# fmt: off


@triton.jit
def prepare_kernel(
    out, rest, tops, dout, lse, dlse, given, row_values, dq_sums, counter, o_strides, r_strides,
    do_strides, dl_strides, scale, heads, padded_length, values_in_all, q_length,
    VALUE_DIM: tl.constexpr, DV: tl.constexpr, D: tl.constexpr, UNITS: tl.constexpr,
    SCATTERED: tl.constexpr, WIDE: tl.constexpr, SCORED: tl.constexpr, HAS_DLSE: tl.constexpr,
    IS_GIVEN: tl.constexpr, HAS_REST: tl.constexpr, WANT_DQ: tl.constexpr, BLOCK_M: tl.constexpr,
):
    """As `anyflex_triton.backward.row_kernel`; rows are padded, and sums of dQ begin at 0.

    Args:
        row_values: [4, B, Hq, padded_length]; rows past the last are as those without a live key.
        dq_sums: [B, Hq, padded_length * D], float32, or where not WANT_DQ anything.
        counter: int32, becomes 0.
        padded_length: a multiple of BLOCK_M.
    """
    tiles = padded_length // BLOCK_M
    bh = tl.program_id(0) // tiles
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < q_length
    value_at = bh.to(tl.int64) * padded_length + rows
    if tl.program_id(0) == 0:
        tl.store(counter, 0)
    if WANT_DQ:
        offsets = value_at[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(dq_sums + offsets, tl.zeros([BLOCK_M, D], tl.float32))
    at = bh.to(tl.int64) * q_length + rows
    natural = tl.load(lse + at, mask=inside, other=float("-inf"))
    store_weighing(
        natural, tops, row_values, value_at, at, inside, None, values_in_all, scale, SCORED,
        IS_GIVEN,
    )
    sums = delta_of_rows(
        out, rest, dout, dlse, given, o_strides, r_strides, do_strides, dl_strides, bh, heads,
        rows, q_length, VALUE_DIM, DV, UNITS, SCATTERED, WIDE, HAS_DLSE, IS_GIVEN, HAS_REST,
    )
    sums = tl.where(natural == float("-inf"), 0.0, sums)
    tl.store(row_values + 3 * values_in_all + value_at, sums)


@triton.jit
def summed_rows(dq_sums, D: tl.constexpr):
    """[64, D] of the sums of 64 rows, which begin at `dq_sums`, in the order in which threads of
    `hopper_backward.add_step` hold them: each 64 columns as [128, 32], 4 elements a thread."""
    sums = tl.load(dq_sums + tl.arange(0, 64 * D))
    # Columns by 64 and by 8; rows by 16, by 2 and by 1; columns by 2; rows by 8; columns.
    sums = tl.reshape(sums, [D // 64, 8, 4, 4, 2, 4, 2, 2])
    sums = tl.permute(sums, [2, 6, 3, 4, 0, 1, 5, 7])
    return tl.reshape(sums, [64, D])


@triton.jit
def convert_kernel(
    dq_sums, dq, row_values, odd_rows, dq_strides, scale, heads, padded_length, q_length,
    DIM: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
):
    """dQ from its sums, 64 query rows a program.

    Args:
        row_values: of `prepare_kernel`.
        odd_rows: int32 [B * Hq * padded_length / 64], filled: 1 where not all sums are finite, or
            some row's lse2 is NaN: of a score mod without a slope by the score sums are 0.
        padded_length: a multiple of 64.
    """
    index = tl.program_id(0)
    tiles = padded_length // 64
    bh = index // tiles
    first_row = index % tiles * 64
    sums = summed_rows(dq_sums + index.to(tl.int64) * (64 * D), D)
    lse2 = tl.load(row_values + index.to(tl.int64) * 64 + tl.arange(0, 64))
    odd = tl.max(tl.max(strange(sums).to(tl.int32), 1) | (lse2 != lse2).to(tl.int32), 0)
    # Rows past the end have no values of their own.
    tl.store(odd_rows + index, tl.where(first_row < q_length, odd, 0))
    base = tensor_at(dq, dq_strides, bh // heads, bh % heads, UNIT)
    rows = first_row + tl.arange(0, 64)
    store_rows(base, dq_strides, rows, q_length, sums * scale, DIM, D, UNIT, WIDE)


@triton.jit
def repair_queries(
    index, query, key, value, dout, row_values, dq, offsets, ends, runs, q_strides, k_strides,
    v_strides, do_strides, dq_strides, mask_strides, tables, ints, floats, totals, shifts, scale,
    heads, padded_length, values_in_all, q_length, kv_length, SCORE_MOD: tl.constexpr,
    SCORE_MOD_BACKWARD: tl.constexpr, CAPTURED_GRADIENTS: tl.constexpr, MASK_MOD: tl.constexpr,
    HAS_MASK: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    KV_SHARED: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    UNITS: tl.constexpr, SCATTERED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dQ of a tile of 64 query rows; what its far rows add to captured tensors' gradients, which
    is missing there."""
    tiles = padded_length // 64
    bh = index // tiles
    b = bh // heads
    h = bh % heads
    first_row = index % tiles * 64
    rows = first_row + tl.arange(0, 64)
    at = bh.to(tl.int64) * padded_length + rows
    kv_head = h // GROUP
    kv_b = 0 * b if KV_SHARED else b
    q_base = tensor_at(query, q_strides, b, h, UNITS[0])
    k_base = tensor_at(key, k_strides, kv_b, kv_head, UNITS[1])
    v_base = tensor_at(value, v_strides, kv_b, kv_head, UNITS[2])
    do_base = tensor_at(dout, do_strides, b, h, UNITS[3])
    q = load_row_parts(q_base, q_strides, rows, q_length, DIM, D, UNITS[0], SCATTERED[0], WIDE)
    do = load_row_parts(
        do_base, do_strides, rows, q_length, VALUE_DIM, DV, UNITS[3], SCATTERED[3], WIDE
    )
    lse2 = tl.load(row_values + at)
    delta = tl.load(row_values + 3 * values_in_all + at)
    top = tl.load(row_values + values_in_all + at)
    size = tl.load(row_values + 2 * values_in_all + at)
    q_idx = tl.minimum(rows, q_length - 1)[:, None] + shifts[2]
    columns = tl.arange(0, BLOCK_N)
    if HAS_MASK:
        run, last_run = mask_row(offsets, ends, mask_strides, b, h, first_row // Q_BLOCK)
    else:
        run = 0
        last_run = 1
    sums = zeros_of_parts(64, DIM, D)
    for r in range(run, last_run):
        begin, end, full = bounded_run(runs, r, KV_BLOCK, kv_length, HAS_MASK)
        for first in range(begin, end, BLOCK_N):
            sums = add_to_queries(
                sums, key, value, k_base, v_base, k_strides, v_strides, q, do, lse2, delta, top,
                size, first, columns, end, kv_length, True, full, b + shifts[0], h + shifts[1],
                q_idx, shifts, tables, ints, floats, totals, scale, None, SCORE_MOD,
                SCORE_MOD_BACKWARD, CAPTURED_GRADIENTS, MASK_MOD, DIM, VALUE_DIM, D, DV, UNITS,
                SCATTERED, WIDE, True, PRECISION, None, True, True,
            )
    base = tensor_at(dq, dq_strides, b, h, UNITS[4])
    store_parts(base, dq_strides, rows, q_length, sums, scale, DIM, D, UNITS[4], WIDE)


@triton.jit
def repair_keys(
    index, query, key, value, dout, row_values, dk, dv, offsets, ends, runs, q_strides, k_strides,
    v_strides, do_strides, dk_strides, dv_strides, mask_strides, tables, ints, floats, shifts,
    scale, batch, heads, kv_heads, padded_length, values_in_all, padded_keys, q_length,
    kv_length, SCORE_MOD: tl.constexpr, SCORE_MOD_BACKWARD: tl.constexpr, MASK_MOD: tl.constexpr,
    HAS_MASK: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    KV_SHARED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, UNITS: tl.constexpr, SCATTERED: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """dK and dV of a tile of BLOCK_N keys."""
    tiles = padded_keys // BLOCK_N
    unit = index // tiles
    first_key = index % tiles * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    kv_b = unit // kv_heads
    kv_head = unit % kv_heads
    k_base = tensor_at(key, k_strides, kv_b, kv_head, UNITS[1])
    v_base = tensor_at(value, v_strides, kv_b, kv_head, UNITS[2])
    k = load_row_parts(k_base, k_strides, keys, kv_length, DIM, D, UNITS[1], SCATTERED[1], WIDE)
    v = load_row_parts(
        v_base, v_strides, keys, kv_length, VALUE_DIM, DV, UNITS[2], SCATTERED[2], WIDE
    )
    kv_idx = tl.minimum(keys, kv_length - 1)[:, None] + shifts[3]
    dk_sum = zeros_of_parts(BLOCK_N, DIM, D)
    dv_sum = zeros_of_parts(BLOCK_N, VALUE_DIM, DV)
    rows_of_tile = tl.arange(0, BLOCK_M)
    streams = GROUP * batch if KV_SHARED else GROUP
    for stream in range(streams):
        b = stream // GROUP if KV_SHARED else kv_b
        h = kv_head * GROUP + stream % GROUP
        q_base = tensor_at(query, q_strides, b, h, UNITS[0])
        do_base = tensor_at(dout, do_strides, b, h, UNITS[3])
        first_value = (b * heads + h).to(tl.int64) * padded_length
        if HAS_MASK:
            run, last_run = mask_row(offsets, ends, mask_strides, b, h, first_key // KV_BLOCK)
        else:
            run = 0
            last_run = 1
        for r in range(run, last_run):
            begin, end, full = bounded_run(runs, r, Q_BLOCK, q_length, HAS_MASK)
            for first in range(begin, end, BLOCK_M):
                dk_sum, dv_sum = add_to_keys(
                    dk_sum, dv_sum, query, dout, row_values, q_base, do_base, q_strides,
                    do_strides, first_value, values_in_all, k, v, first, rows_of_tile, end,
                    q_length, True, full, b + shifts[0], h + shifts[1], kv_idx, shifts, tables,
                    ints, floats, scale, None, SCORE_MOD, SCORE_MOD_BACKWARD, MASK_MOD, DIM,
                    VALUE_DIM, D, DV, UNITS, SCATTERED, WIDE, True, True, PRECISION, None, True,
                    True,
                )
    base = tensor_at(dv, dv_strides, kv_b, kv_head, UNITS[6])
    store_parts(base, dv_strides, keys, kv_length, dv_sum, None, VALUE_DIM, DV, UNITS[6], WIDE)
    base = tensor_at(dk, dk_strides, kv_b, kv_head, UNITS[5])
    store_parts(base, dk_strides, keys, kv_length, dk_sum, scale, DIM, D, UNITS[5], WIDE)


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
    """dQ, where WANT_DQ, dK and dV anew where they aren't finite, and what far rows add to
    captured tensors' gradients. A program looks at TILES tiles.

    Args:
        row_values: of `prepare_kernel`.
        totals: as `anyflex_triton.backward_queries`'s, where CAPTURED_GRADIENTS.
        offsets, ends, runs: of the mask; those of its transpose are the keys'.
        odd_rows: int32 [row_tiles], of `convert_kernel`.
        odd_keys: int32 [key_tiles]: of 64 keys each, whether some dk or dv isn't finite.
        row_programs: the first so many look at rows, the others at keys.
    """
    index = tl.program_id(0)
    many = tl.arange(0, TILES)
    if WANT_DQ:
        if index < row_programs:
            first = index * TILES
            odd = tl.load(odd_rows + first + many, mask=first + many < row_tiles, other=0)
            if tl.max(odd, 0) > 0:
                for tile in range(first, tl.minimum(first + TILES, row_tiles)):
                    if tl.load(odd_rows + tile) > 0:
                        repair_queries(
                            tile, query, key, value, dout, row_values, dq, offsets, ends, runs,
                            q_strides, k_strides, v_strides, do_strides, dq_strides, mask_strides,
                            tables, ints, floats, totals, shifts, scale, heads, padded_length,
                            values_in_all, q_length, kv_length, SCORE_MOD, SCORE_MOD_BACKWARD,
                            CAPTURED_GRADIENTS, MASK_MOD, HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP,
                            KV_SHARED, DIM, VALUE_DIM, D, DV, UNITS, SCATTERED, WIDE, PRECISION,
                            BLOCK_N,
                        )
            return
        index -= row_programs
    first = index * TILES
    odd = tl.load(odd_keys + first + many, mask=first + many < key_tiles, other=0)
    if tl.max(odd, 0) > 0:
        for tile in range(first, tl.minimum(first + TILES, key_tiles)):
            if tl.load(odd_keys + tile) > 0:
                for part in range(64 // BLOCK_N):
                    repair_keys(
                        tile * (64 // BLOCK_N) + part, query, key, value, dout, row_values, dk,
                        dv, key_offsets, key_ends, key_runs, q_strides, k_strides, v_strides,
                        do_strides, dk_strides, dv_strides, key_mask_strides, tables, ints,
                        floats, shifts, scale, batch, heads, kv_heads, padded_length,
                        values_in_all, padded_keys, q_length, kv_length, SCORE_MOD,
                        SCORE_MOD_BACKWARD, MASK_MOD, HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP,
                        KV_SHARED, DIM, VALUE_DIM, D, DV, UNITS, SCATTERED, WIDE, PRECISION, 64,
                        BLOCK_N,
                    )
