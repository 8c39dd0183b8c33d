"""Forward for a few query rows: keys are cut into splits, whose results are combined.

Split-KV (Flash-Decoding, Dao et al., 2023). The query heads of a KV head are rows of one tile, so
that keys are read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyflex_triton.dependent_launch import await_earlier, let_next_begin
from anyflex_triton.dropout import kept_pairs, of_rows, with_seed
from anyflex_triton.forward import unit_of_scores
from anyflex_triton.kernel_records import ModInputs, Mods, RowLayouts, RowResults
from anyflex_triton.sequences import (
    first_of_split,
    has_rows,
    keys_of_sequence,
    sequence_of_tile,
    store_padding,
)
from anyflex_triton.tiles import (
    LOG2E,
    bounded_run,
    in_type,
    load_key_scales,
    load_scales,
    load_tile,
    mask_row,
    nonfinite,
    nonfinite_sum,
    rows_of_steps,
    scaled_tile,
    store_row,
    tensor_at,
    without_nonfinite,
)

__all__ = ["combine_kernel", "decode_kernel"]

# Argument lists would be a line an argument.
# fmt: off


@triton.jit
def scores_of_tile(
    q, keys, first, columns, end, live, kv_idx, inputs, mods, BOUND: tl.constexpr,
):
    """Return scores [M, N] of the keys first + columns as `forward.final_scores` does; -inf at
    dead pairs.

    Args:
        keys: `HeadRows`. BOUND: some may be past `end`.
        live: [M, N], or None where all pairs are live.
    """
    k = in_type(load_tile(keys, first, columns, end, BOUND), q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=keys.PRECISION)
    if keys.scales is not None:
        scores *= load_key_scales(keys, first, columns, end, BOUND)[None, :]
    if mods.SCORE_MOD is not None:
        scores = mods.SCORE_MOD(
            scores * mods.scale, inputs.b, inputs.h, inputs.q_idx, kv_idx, inputs.tables,
            mods.ints, mods.floats,
        )
    if live is not None:
        scores = tl.where(live, scores, float("-inf"))
    return scores


@triton.jit
def weights_of_step(scores, row_max, row_sum, nans, unit):
    """Return (weights, factor of the earlier values, row_max, row_sum, nans) after the scores of
    one more step."""
    nans = tl.maximum(nans, tl.max((scores != scores).to(tl.int32), 1))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # The difference is taken before scaling, because scores may be huge. It costs nothing: loading
    # keys takes longer.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2((scores - shift[:, None]) * unit)
    alpha = tl.exp2((row_max - shift) * unit)
    return weights, alpha, new_max, row_sum * alpha + tl.sum(weights, 1), nans


@triton.jit
def decode_kernel(
    query, key, value, partial_out, offsets, ends, runs, q_strides, k_strides, v_strides,
    mask_strides, tables, ints, floats, shifts, scale, dropout, sequences, k_scale, v_scale,
    sums_at, heads, q_length, kv_length, splits, split_length, SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr, HAS_MASK: tl.constexpr, KV_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, PACKED: tl.constexpr, KV_SHARED: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, UNITS: tl.constexpr,
    SCATTERED: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
    LEADS: tl.constexpr, DECODED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Compute a split of the keys for PACKED query heads (GROUP of them, or 1); one program per
    split.

    Where DECODED isn't 0, the call is batch-invariant: only sequences with at most that many
    query rows are computed, each row is in the same row of a tile whatever the bounds are, and
    `first_of_split` says where splits begin.

    Args:
        partial_out: [B, Hq, L, splits, Ev], float32, relative to each split's own row_max; from
            its element `sums_at` on [B, Hq, L, splits, 3]: row_max, row_sum relative to it, and 1
            if a score is NaN. Of a split without keys in a packed sequence only these are written.
            Where DECODED, [tiles, Hq, rows of a sequence, splits, Ev], and nothing of such splits.
    """
    if LEADS:
        let_next_begin()
    split = tl.program_id(0) % splits
    unit = tl.program_id(0) // splits
    units_a_batch = heads // PACKED
    b = unit // units_a_batch
    first_head = unit % units_a_batch * PACKED
    kv_head = first_head // GROUP
    mask_b = b
    mask_block = 0
    mod_b = b + shifts[0]
    q_shift = shifts[2]
    rows_of_head = q_length
    first_row = 0
    if sequences is not None:
        # A row of blocks is a whole sequence.
        own = sequence_of_tile(sequences, b, q_length, 128, PAGE, 128)
        if own.is_padding or own.first_row >= own.end_row:
            return
        if DECODED:  # noqa: SIM102
            if not has_rows(sequences, own.owner, DECODED):
                return
        tile = b
        b = 0 * b
        mask_b = b
        mask_block = own.row
        mod_b = own.b + shifts[0]
        first_row = own.first_row
        q_shift += own.shift + first_row
        kv_length = own.kv_length
        rows_of_head = DECODED if DECODED else sequences[15]
    kv_b = 0 * b if KV_SHARED else b
    packed = tl.arange(0, BLOCK_M)
    inside = packed < PACKED * rows_of_head
    row = packed % rows_of_head
    head = first_head + tl.minimum(packed // rows_of_head, PACKED - 1)
    if sequences is not None:
        inside = inside & (row < own.end_row - first_row)
        row = tl.minimum(row, own.end_row - first_row - 1)
    if DECODED:
        kept = tl.minimum(sequences[15], DECODED)
        at = ((tile * heads + head).to(tl.int64) * kept + row) * splits + split
        split_begin = first_of_split(split)
        split_end = tl.minimum(first_of_split(split + 1), kv_length)
    else:
        at = ((b * heads + head).to(tl.int64) * q_length + first_row + row) * splits + split
        split_begin = split * split_length
        split_end = tl.minimum(split_begin + split_length, kv_length)
    partial_sums = partial_out + sums_at + at * 3
    # A bound cuts the keys: a shorter sequence has none in the last splits. Nested, because one
    # condition would be no constant's.
    if sequences is not None:  # noqa: SIM102
        if split_begin >= split_end:
            if DECODED:
                return
            tl.store(partial_sums, float("-inf"), mask=inside)
            tl.store(partial_sums + 1, 0.0, mask=inside)
            tl.store(partial_sums + 2, 0.0, mask=inside)
            return

    dims = tl.arange(0, D)
    q_rows = (
        tensor_at(query, q_strides, b, first_head, UNITS[0])
        + (head - first_head).to(tl.int64) * q_strides[1] * UNITS[0]
        + (first_row + row).to(tl.int64) * q_strides[2] * UNITS[0]
    )
    if SCATTERED[0]:
        q_at = q_rows[:, None] + dims[None, :].to(tl.int64) * q_strides[3]
    else:
        q_at = q_rows[:, None] + dims[None, :]
    q = tl.load(q_at, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    layouts = RowLayouts(UNITS=UNITS, SCATTERED=SCATTERED, WIDE=WIDE, PRECISION=PRECISION)
    keys = rows_of_steps(
        key, k_strides, kv_b, kv_head, heads, kv_length, layouts, 1, DIM, D, BLOCK_N, DESCRIBED,
        False,
    )
    values = rows_of_steps(
        value, v_strides, kv_b, kv_head, heads, kv_length, layouts, 2, VALUE_DIM, DV, BLOCK_N,
        DESCRIBED, False,
    )
    if sequences is not None:
        keys = keys_of_sequence(keys, sequences, own, k_scale, kv_head, PAGE)
        values = keys_of_sequence(values, sequences, own, v_scale, kv_head, PAGE)
    inputs = ModInputs(
        b=mod_b, h=head[:, None] + shifts[1], q_idx=row[:, None] + q_shift, kv_idx=None,
        tables=tables,
    )
    mods = Mods(
        ints=ints, floats=floats, shifts=shifts, scale=scale, READ=None, SCORE_MOD=SCORE_MOD,
        MASK_MOD=MASK_MOD,
    )
    columns = tl.arange(0, BLOCK_N)
    dropped = None
    if dropout is not None:
        dropped = of_rows(with_seed(dropout), inputs.b, inputs.h, inputs.q_idx)

    unit = unit_of_scores(scale, SCORE_MOD)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    nans = tl.zeros([BLOCK_M], tl.int32)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    run, last_run = mask_row(
        offsets, ends, mask_strides, mask_b, first_head, mask_block, HAS_MASK,
    )

    for r in range(run, last_run):
        if HAS_MASK:
            begin, end, full = bounded_run(runs, r, KV_BLOCK, split_end, True)
            begin = tl.maximum(begin, split_begin)
            steps = tl.where(full, tl.maximum(end - begin, 0) // BLOCK_N, 0)
        else:
            begin = split_begin
            steps = tl.maximum(split_end - split_begin, 0) // BLOCK_N
        if dropout is not None:
            # The other loop looks for non-finite values, which may be dropped.
            steps = 0
        for step in range(steps):
            first = begin + step * BLOCK_N
            places = first + columns
            v = load_tile(values, first, columns, 0, False)
            kv_idx = places[None, :] + shifts[3]
            scores = scores_of_tile(
                q, keys, first, columns, 0, None, kv_idx, inputs, mods, False,
            )
            weights, alpha, row_max, row_sum, nans = weights_of_step(
                scores, row_max, row_sum, nans, unit,
            )
            if values.scales is not None:
                of_values = load_scales(values, first, columns, 0, False)
                if q.dtype == tl.float16:
                    # Weights times small scales have few bits in this type.
                    v = scaled_tile(v, of_values, q.dtype)
                else:
                    weights *= of_values[None, :]
            acc = tl.dot(
                weights.to(q.dtype), in_type(v, q.dtype), acc * alpha[:, None],
                input_precision=PRECISION,
            )

    for r in range(run, last_run):
        if HAS_MASK:
            begin, end, full = bounded_run(runs, r, KV_BLOCK, split_end, True)
            begin = tl.maximum(begin, split_begin)
            if dropout is None:
                whole = tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N
                begin = tl.where(full, begin + whole, begin)
        else:
            begin = split_begin
            if dropout is None:
                begin += tl.maximum(split_end - split_begin, 0) // BLOCK_N * BLOCK_N
            end = split_end
            full = True
        for first in range(begin, end, BLOCK_N):
            places = first + columns
            v = load_tile(values, first, columns, end, True)
            if values.scales is not None:
                # This loop looks for non-finite values, of which there are stored ones and scales.
                v = scaled_tile(v, load_scales(values, first, columns, end, True), q.dtype)
            kv_idx = tl.minimum(places, kv_length - 1)[None, :] + shifts[3]
            live = (places < end)[None, :] & inside[:, None]
            if MASK_MOD is not None:
                seen = MASK_MOD(
                    inputs.b, inputs.h, inputs.q_idx, kv_idx, inputs.tables, ints, floats,
                )
                live = live & (full | seen)
            scores = scores_of_tile(
                q, keys, first, columns, end, live, kv_idx, inputs, mods, True,
            )
            live = live & (scores != float("-inf"))
            weights, alpha, row_max, row_sum, nans = weights_of_step(
                scores, row_max, row_sum, nans, unit,
            )
            if dropout is not None:
                kept = kept_pairs(dropped, kv_idx)
                weights = tl.where(kept, weights, 0.0)
                live = live & kept
            acc = tl.dot(
                weights.to(v.dtype), without_nonfinite(v), acc * alpha[:, None],
                input_precision=PRECISION,
            )
            if tl.max(tl.max(nonfinite(v).to(tl.int32), 1), 0) > 0:
                # Non-finite values reach only the rows that see them.
                acc += nonfinite_sum(live, v)

    tl.store(partial_sums, row_max, mask=inside)
    tl.store(partial_sums + 1, row_sum, mask=inside)
    tl.store(partial_sums + 2, nans.to(tl.float32), mask=inside)
    value_dims = tl.arange(0, DV)
    if dropout is not None:
        acc *= dropout[3]
    tl.store(
        partial_out + at[:, None] * VALUE_DIM + value_dims[None, :],
        acc,
        mask=inside[:, None] & (value_dims < VALUE_DIM)[None, :],
    )


@triton.jit
def is_split(split, splits, kv_length, DECODED: tl.constexpr):
    """Return which splits, given by number, were computed."""
    if DECODED:
        return (split < splits) & (first_of_split(split) < kv_length)
    else:
        return split < splits


@triton.jit
def combine_kernel(
    partial_out, out, rest, tops, lse, max_scores, o_strides, scale, sinks, sequences, sums_at,
    heads, q_length, splits, PAGE: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr,
    SPLITS: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, SCORED: tl.constexpr,
    WANT_LSE: tl.constexpr, WANT_MAX: tl.constexpr, WANT_REST: tl.constexpr,
    WANT_TOPS: tl.constexpr, FOLLOWS: tl.constexpr, DECODED: tl.constexpr,
):
    """Combine the splits of a query row in their order, SPLITS at a time; one program per row, or
    where DECODED per row that a sequence may have.
    """
    if FOLLOWS:
        await_earlier()
    at = tl.program_id(0).to(tl.int64)
    result_at = at
    index = tl.arange(0, SPLITS)
    kv_length = 0
    if DECODED:
        kept = tl.minimum(sequences[15], DECODED)
        unit = tl.program_id(0) // kept
        row = tl.program_id(0) % kept
        own = sequence_of_tile(sequences, unit // heads, q_length, 128, PAGE, 128)
        h = unit % heads
        if own.is_padding:
            if row == 0:
                store_padding(
                    out, lse, max_scores, o_strides, h, q_length, own, VALUE_DIM, DV, UNIT, WIDE,
                    WANT_LSE, WANT_MAX, 128,
                )
            return
        if own.first_row + row >= own.end_row or not has_rows(sequences, own.owner, DECODED):
            return
        result_at = h.to(tl.int64) * q_length + own.first_row + row
        kv_length = own.kv_length
    elif sequences is not None:
        # Padding rows have no splits.
        owned = at % q_length < tl.load(sequences[1] + sequences[8])
        splits = tl.where(owned, splits, 0)
    partial_sums = partial_out + sums_at
    row_max = float("-inf")
    for first in range(0, splits, SPLITS):
        there = is_split(first + index, splits, kv_length, DECODED)
        found = tl.load(
            partial_sums + (at * splits + first + index) * 3, mask=there, other=float("-inf"),
        )
        row_max = tl.maximum(row_max, tl.max(found, 0))
    unit = LOG2E if SCORED else scale * LOG2E
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = 0.0
    nan = 0.0
    acc = tl.zeros([DV], tl.float32)
    dims = tl.arange(0, DV)
    for first in range(0, splits, SPLITS):
        there = is_split(first + index, splits, kv_length, DECODED)
        place = at * splits + first + index
        found = tl.load(partial_sums + place * 3, mask=there, other=float("-inf"))
        sums = tl.load(partial_sums + place * 3 + 1, mask=there, other=0.0)
        nans = tl.load(partial_sums + place * 3 + 2, mask=there, other=0.0)
        nan = tl.maximum(nan, tl.max(nans, 0))
        factor = tl.exp2((found - shift) * unit)
        row_sum += tl.sum(tl.where(there, sums * factor, 0.0), 0)
        if sequences is not None:
            there = there & ((found != float("-inf")) | (sums != 0.0))
        part = tl.load(
            partial_out + place[:, None] * VALUE_DIM + dims[None, :],
            mask=there[:, None] & (dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        acc += tl.sum(tl.where(there[:, None], part * factor[:, None], 0.0), 0)
    results = RowResults(
        tops=tops, lse=lse, max_scores=max_scores, SCORED=SCORED, WANT_LSE=WANT_LSE,
        WANT_MAX=WANT_MAX, WANT_TOPS=WANT_TOPS, sinks=sinks,
    )
    store_row(
        acc, row_max, row_sum, nan, result_at, out, rest, o_strides, scale, results, heads,
        q_length, VALUE_DIM, DV, UNIT, WANT_REST,
    )
