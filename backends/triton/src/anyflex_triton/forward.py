"""Forward for many query rows: a program takes one query tile over its row of runs.

FlashAttention-2's online softmax (Dao, 2023), in powers of two.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from anyflex_triton.column_parts import (
    add_products,
    any_nonfinite,
    load_pointed_rows,
    load_step_rows,
    product_of_rows,
    rows_times,
    scaled_rows,
    zeros_of_parts,
)
from anyflex_triton.dropout import kept_pairs, of_rows, with_seed
from anyflex_triton.kernel_records import ModInputs, Mods, RowLayouts
from anyflex_triton.records import record
from anyflex_triton.sequences import (
    has_rows,
    keys_of_sequence,
    sequence_of_tile,
    store_padding,
)
from anyflex_triton.tiles import (
    FAR,
    FEW,
    LOG2E,
    bounded_run,
    first_other_step,
    indices,
    is_far,
    load_key_scales,
    load_part,
    load_scales,
    long_steps,
    mask_row,
    masked_scores,
    natural_scores,
    next_other_step,
    nonfinite_sum,
    place_of_tile,
    rows_by_pointers,
    rows_of_steps,
    scaled_tile,
    store_part,
    store_rows,
    tensor_at,
    with_sink,
    without_nonfinite,
)

__all__ = [
    "final_scores",
    "forward_kernel",
    "plain_score",
    "tile_of_program",
    "unit_of_scores",
]

CHAINS = tl.constexpr(16)
"""Number of a row's partial maxima, where PARTS: as many as the shortest step has keys."""
SUMS = tl.constexpr(8)
"""Number of a row's partial sums, where PARTS: a thread has every eighth column of a product."""


@record
class Softmax:
    """State of an online softmax.

    Attributes:
        row_max: [M], largest score so far.
        base: [M], row_max in powers of two, to which weights are relative.
        row_sum: sum of weights, as returned by `added_to_rows`.
        nans: [M], where WANT_MAX: whether a score was NaN, which row_max doesn't tell.
        acc: weighted values, [M, DV] for each part.
    """

    row_max: Any
    base: Any
    row_sum: Any
    nans: Any
    acc: Any


@record
class StepWeights:
    """Weights of a step, to be added to acc; where OVERLAP, that happens in the step after it.

    Attributes:
        weights: [M, N].
        alpha: [M], factor of the earlier acc.
    """

    weights: Any
    alpha: Any


# Argument lists would be a line an argument.
# fmt: off


@triton.jit
def plain_score(score, b, h, q_idx, kv_idx, tables, ints, floats):
    """Identity score mod; needed when scale <= 0, which can't be folded into exp2."""
    return score


@triton.jit
def tile_of_program(index, tiles, heads, head_group):
    """Return (tile, head) of a program. A few heads, whose keys fit the L2 cache, run at a time,
    and their last tiles first, which are the longest under causal masks."""
    group = index // (head_group * tiles)
    first = group * head_group
    size = tl.minimum(head_group, heads - first)
    rest = index - first * tiles
    return tiles - 1 - rest // size, first + rest % size


@triton.jit
def final_scores(scores, masked, inside, full, inputs, mods):
    """Return scores from q k^T, -inf at dead pairs (see `masked_scores`). They come scaled if
    there is a score mod; otherwise the scale is positive and is applied later: see
    `unit_of_scores`."""
    if mods.SCORE_MOD is not None:
        scores = mods.SCORE_MOD(
            scores, inputs.b, inputs.h, inputs.q_idx, inputs.kv_idx, inputs.tables, mods.ints,
            mods.floats,
        )
    return masked_scores(
        scores, masked, inside, full, inputs.b, inputs.h, inputs.q_idx, inputs.kv_idx,
        inputs.tables, mods.ints, mods.floats, mods.MASK_MOD,
    )


@triton.jit
def unit_of_scores(scale, SCORE_MOD: tl.constexpr):
    """Return the factor that turns `final_scores` into powers of two."""
    if SCORE_MOD is None:
        return scale * LOG2E
    else:
        return LOG2E


@triton.jit
def largest_of_rows(scores, PARTS: tl.constexpr):
    """Return the largest of each row of scores [M, N]: [M]. In `tl.max` each of a thread's
    operations waits for the one before; where PARTS they are independent."""
    if PARTS:
        parts = tl.reshape(scores, [scores.shape[0], scores.shape[1] // CHAINS, CHAINS])
        return tl.max(tl.max(parts, 1), 1)
    else:
        return tl.max(scores, 1)


@triton.jit
def added_to_rows(row_sum, weights, alpha, PARTS: tl.constexpr):
    """Return row_sum after one more step: [M], or where PARTS each thread's own, [M, SUMS], which
    are added up when the tile ends."""
    if PARTS:
        parts = tl.reshape(weights, [weights.shape[0], weights.shape[1] // SUMS, SUMS])
        return row_sum * alpha[:, None] + tl.sum(parts, 1)
    else:
        return row_sum * alpha + tl.sum(weights, 1)


@triton.jit
def add_values(
    acc, step, values, first, columns, end, dtype: tl.constexpr, BOUND: tl.constexpr
):
    """Return acc after the values of one step are added.

    Args:
        dtype: of query, that of values which aren't stored in it.
    """
    v = load_step_rows(values, first, columns, end, BOUND)
    if values.scales is not None:
        v = rows_times(v, load_scales(values, first, columns, end, BOUND), dtype)
    scaled = scaled_rows(acc, step.alpha)
    return add_products(scaled, step.weights.to(v[0].dtype), v, values.PRECISION)


@triton.jit
def no_weights(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return `StepWeights` that add nothing."""
    return StepWeights(
        weights=tl.zeros([ROWS, COLUMNS], tl.float32), alpha=tl.full([ROWS], 1.0, tl.float32),
    )


@triton.jit
def forward_step(
    softmax, step, q, keys, values, inputs, mods, first, before, columns, end, kv_length, masked,
    full, WANT_MAX: tl.constexpr, BOUND: tl.constexpr, OVERLAP: tl.constexpr, PARTS: tl.constexpr,
):
    """Return (Softmax, StepWeights) after one more step, of the keys from `first` on.

    Args:
        step: weights of the step before, which began at `before`; where OVERLAP, its values are
            added now.
        masked, full: arguments of `masked_scores`.
        BOUND: some keys may be past `end`.
        PARTS: row_max and row_sum are found in parts.
    """
    acc = softmax.acc
    nans = softmax.nans
    tables = inputs.tables
    k = load_step_rows(keys, first, columns, end, BOUND)
    raw = product_of_rows(q, k, keys.PRECISION)
    if keys.scales is not None:
        raw *= load_key_scales(keys, first, columns, end, BOUND)[None, :]
    if OVERLAP:
        acc = add_values(acc, step, values, before, columns, end, q[0].dtype, BOUND)
    places = first + columns
    kv_idx = indices(
        first, columns, kv_length, mods.shifts[3], BOUND, mods.SCORE_MOD is not None,
    )
    inside = (places < end)[None, :] if BOUND else None
    if mods.READ is not None:
        tables = mods.READ(inputs.b, inputs.h, kv_idx, tables, mods.ints, mods.floats)
    if mods.SCORE_MOD is not None:
        raw = raw * mods.scale
    scores = final_scores(
        raw, masked, inside, full,
        ModInputs(
            b=inputs.b, h=inputs.h, q_idx=inputs.q_idx, kv_idx=kv_idx[None, :], tables=tables,
        ),
        mods,
    )
    if WANT_MAX:
        nans = tl.maximum(nans, tl.max((scores != scores).to(tl.int32), 1))
    unit = unit_of_scores(mods.scale, mods.SCORE_MOD)
    row_max = tl.maximum(softmax.row_max, largest_of_rows(scores, PARTS))
    base = row_max * unit
    # Below -FAR no weight counts beside later ones, or else the row is far in the end.
    shift = tl.where(base <= -FAR, 0.0, base)
    weights = tl.exp2(scores * unit - shift[:, None])
    alpha = tl.exp2(softmax.base - shift)
    row_sum = added_to_rows(softmax.row_sum, weights, alpha, PARTS)
    if inputs.dropout is not None:
        weights = tl.where(kept_pairs(inputs.dropout, kv_idx[None, :]), weights, 0.0)
    made = StepWeights(weights=weights, alpha=alpha)
    if not OVERLAP:
        acc = add_values(acc, made, values, first, columns, end, q[0].dtype, BOUND)
    return Softmax(row_max=row_max, base=base, row_sum=row_sum, nans=nans, acc=acc), made


@triton.jit
def careful_step(
    acc, row_max, highest, row_sum, q, keys, values, inputs, mods, first, end, kv_length, columns,
    full,
):
    """Return (acc, highest, row_sum) after one more careful step, of the FEW keys from `first` on:
    the largest score, and sums of values and weights relative to `row_max`. Non-finite values
    reach only the rows that see them.

    Args:
        acc: [M, C], for `columns` of the values.
        row_max: [M], largest score of all steps; any number while that is unknown.
        highest: [M], largest score of the steps so far.
        keys, values: `HeadRows` by pointers.
    """
    tables = inputs.tables
    few = tl.arange(0, FEW)
    places = first + few
    k = load_pointed_rows(keys, places, end)
    kv_idx = tl.minimum(places, kv_length - 1) + mods.shifts[3]
    if mods.READ is not None:
        tables = mods.READ(inputs.b, inputs.h, kv_idx, tables, mods.ints, mods.floats)
    scores = product_of_rows(q, k, keys.PRECISION)
    if keys.scales is not None:
        scores *= load_key_scales(keys, first, few, end, True)[None, :]
    if mods.SCORE_MOD is not None:
        scores = scores * mods.scale
    scores = final_scores(
        scores, True, (places < end)[None, :], full,
        ModInputs(
            b=inputs.b, h=inputs.h, q_idx=inputs.q_idx, kv_idx=kv_idx[None, :], tables=tables,
        ),
        mods,
    )
    v = load_part(values, places, end, columns)
    if values.scales is not None:
        v = scaled_tile(v, load_scales(values, first, few, end, True), q[0].dtype)
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    weights = tl.exp2((scores - shift[:, None]) * unit_of_scores(mods.scale, mods.SCORE_MOD))
    row_sum += tl.sum(weights, 1)
    if inputs.dropout is not None:
        kept = kept_pairs(inputs.dropout, kv_idx[None, :])
        weights = tl.where(kept, weights, 0.0)
    acc = tl.dot(weights.to(v.dtype), without_nonfinite(v), acc, input_precision=values.PRECISION)
    seen = scores != float("-inf")
    if inputs.dropout is not None:
        seen = seen & kept
    acc += nonfinite_sum(seen, v)
    return acc, tl.maximum(highest, tl.max(scores, 1)), row_sum


@triton.jit
def is_dead(row_max, row_sum):
    """Return which rows have no live pair: their row_sum is 0. NaN isn't 0."""
    return (row_max == float("-inf")) & (row_sum == row_sum)


@triton.jit
def divided(acc, row_max, row_sum, dropout):
    """Return a softmax's values; 0 in dead rows."""
    dead = is_dead(row_max, row_sum)
    acc = acc / tl.where(dead, 1.0, row_sum)[:, None]
    if dropout is not None:
        acc *= dropout.scale
    return tl.where(dead[:, None], 0.0, acc)


@triton.jit
def rounding_of(values, dtype):
    """Return the rounding residual of `values`; backward's delta needs it."""
    return without_nonfinite(values - values.to(dtype).to(tl.float32))


@triton.jit
def forward_kernel(
    query, key, value, key_rows, value_rows, out, rest, tops, lse, max_scores, offsets, ends, runs,
    q_strides, k_strides, v_strides, o_strides, r_strides, mask_strides, tables, ints, floats,
    shifts, scale, dropout, sinks, sequences, k_scale, v_scale, batch_heads, heads, q_length,
    kv_length, tiles, head_group,
    READ_ROWS: tl.constexpr, READ_COLUMNS: tl.constexpr, SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr, HAS_MASK: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr,
    PAGE: tl.constexpr, GROUP: tl.constexpr, KV_SHARED: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, UNITS: tl.constexpr,
    SCATTERED: tl.constexpr, WIDE: tl.constexpr, WANT_LSE: tl.constexpr, WANT_MAX: tl.constexpr,
    WANT_REST: tl.constexpr, WANT_TOPS: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIBED: tl.constexpr, BESIDE: tl.constexpr, MASK_READS: tl.constexpr, EVEN: tl.constexpr,
    OVERLAP: tl.constexpr, PARTS: tl.constexpr, DECODED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute a query tile of BLOCK_M rows of one query head; one program per tile. Its loops step
    over key and value: of a packed call, over those of the tile's sequence, in its own places.
    """
    tile, bh = tile_of_program(tl.program_id(0), tiles, batch_heads, head_group)
    b = bh // heads
    h = bh % heads
    mod_b = b + shifts[0]
    last_row = q_length - 1
    q_shift = shifts[2]
    if sequences is None:
        block, first_row, end_row = place_of_tile(tile, q_length, Q_BLOCK, BLOCK_M, HAS_MASK)
    else:
        own = sequence_of_tile(sequences, tile, q_length, Q_BLOCK, PAGE, BLOCK_M)
        block, first_row, end_row = own.row, own.first_row, own.end_row
        mod_b += own.b
        last_row = own.last_row
        q_shift += own.shift
        kv_length = own.kv_length
        if own.is_padding:
            if tile % sequences[9] == 0:
                store_padding(
                    out, lse, max_scores, o_strides, h, q_length, own, VALUE_DIM, DV, UNITS[3],
                    WIDE, WANT_LSE, WANT_MAX, Q_BLOCK,
                )
            return
        # Nested, because one condition would be no constant's.
        if DECODED:  # noqa: SIM102
            if has_rows(sequences, own.owner, DECODED):
                return
    run, last_run = mask_row(offsets, ends, mask_strides, b, h, block, HAS_MASK)
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
    if sequences is not None:
        keys = keys_of_sequence(keys, sequences, own, k_scale, kv_head, PAGE)
        values = keys_of_sequence(values, sequences, own, v_scale, kv_head, PAGE)
    q = load_pointed_rows(queries, rows, end_row)
    # Mods see rows past the end as the last row.
    mod_h = h + shifts[1]
    q_idx = tl.minimum(rows, last_row)[:, None] + q_shift
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
    columns = tl.arange(0, BLOCK_N)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    softmax = Softmax(
        row_max=row_max, base=row_max,
        row_sum=tl.zeros([BLOCK_M, SUMS] if PARTS else [BLOCK_M], tl.float32),
        nans=tl.zeros([BLOCK_M], tl.int32), acc=zeros_of_parts(BLOCK_M, VALUE_DIM, DV),
    )

    others = 0

    # This loop runs long FULL runs except for their last step: no pair is dead.
    for r in range(run, last_run):
        begin, run_end, run_full = bounded_run(runs, r, KV_BLOCK, kv_length, HAS_MASK)
        steps = long_steps(begin, run_end, run_full, BLOCK_N)
        others += (run_end - begin + BLOCK_N - 1) // BLOCK_N - steps
        # Where OVERLAP, a step's weights are multiplied by their values while the next step's
        # weights are computed (FlashAttention-3: Shah et al., 2024). The first step has none
        # before it.
        step = no_weights(BLOCK_M, BLOCK_N)
        for i in range(steps):
            first = begin + i * BLOCK_N
            before = begin + tl.maximum(i - 1, 0) * BLOCK_N
            softmax, step = forward_step(
                softmax, step, q, keys, values, inputs, mods, first, before, columns, 0, kv_length,
                None, True, WANT_MAX, False, OVERLAP, PARTS,
            )
        # Nested on purpose: `OVERLAP and steps > 0` would not compile to a branch.
        if OVERLAP:  # noqa: SIM102
            if steps > 0:
                last = begin + (steps - 1) * BLOCK_N
                acc = add_values(
                    softmax.acc, step, values, last, columns, 0, q[0].dtype, False,
                )
                softmax = Softmax(
                    row_max=softmax.row_max, base=softmax.base, row_sum=softmax.row_sum,
                    nans=softmax.nans, acc=acc,
                )

    # One loop takes PARTIAL runs and the rest of the others, because each loop begins with a wait.
    # Its steps were counted above, and `_once` is no `if`: otherwise ptxas makes products wait for
    # each other (C7515), and Triton fails to compile forward for Blackwell.
    r = run
    first, end, full = first_other_step(
        runs, run, last_run, KV_BLOCK, kv_length, BLOCK_N, HAS_MASK,
    )
    step = no_weights(BLOCK_M, BLOCK_N)
    for _once in range(tl.minimum(others, 1)):
        for _step in range(others):
            mask_full = full
            if EVEN and not MASK_READS:
                masked = None if MASK_MOD is None else not full
                mask_full = None
            elif MASK_READS:
                # With a branch Triton would choose another layout for all scores.
                masked = True
            else:
                masked = (not full) | (first + BLOCK_N > end)
            softmax, step = forward_step(
                softmax, step, q, keys, values, inputs, mods, first, first, columns, end,
                kv_length, masked, mask_full, WANT_MAX, not EVEN, False, PARTS,
            )
            r, first, end, full = next_other_step(
                runs, r, last_run, first, end, full, KV_BLOCK, kv_length, BLOCK_N, HAS_MASK,
            )

    row_max = softmax.row_max
    base = softmax.base
    nans = softmax.nans
    acc = softmax.acc
    row_sum = tl.sum(softmax.row_sum, 1) if PARTS else softmax.row_sum
    SCORED: tl.constexpr = SCORE_MOD is not None
    # Weights are relative to the rounded base, not to row_max; excess is the difference.
    excess = tl.fma(row_max, 0.0 - unit_of_scores(scale, SCORE_MOD), base)
    # Non-finite values have also reached rows that don't see them, because 0 * NaN is NaN, and
    # weights of far rows are lost. This is found before the sums are stored, which then need no
    # registers.
    inexact = any_nonfinite(acc) | is_far(row_max, base).to(tl.int32)
    is_inexact = tl.max(inexact, 0) > 0
    # Counted from the tile's first row: reusing the query's `rows` would keep it live in registers
    # across the loops.
    of_tile = tl.arange(0, BLOCK_M)
    there = end_row - first_row
    o_base = tensor_at(out, o_strides, b, h, UNITS[3])
    o_base += first_row.to(tl.int64) * o_strides[2] * UNITS[3]
    r_base = tensor_at(rest, r_strides, b, h, UNITS[4])
    r_base += first_row.to(tl.int64) * r_strides[2] * UNITS[4]
    exact = tl.where(is_inexact, 0, there)
    sink = 0.0
    whole = row_sum
    if sinks is not None:
        sink = tl.load(sinks + h)
        whole = with_sink(row_sum, row_max, base, sink)
    for i in tl.static_range(len(acc)):
        found = divided(acc[i], row_max, whole, inputs.dropout)
        store_rows(
            o_base, o_strides, of_tile, exact, found, VALUE_DIM, DV, UNITS[3], WIDE, i * DV,
        )
        if WANT_REST:
            rounding = rounding_of(found, out.dtype.element_ty)
            store_rows(
                r_base, r_strides, of_tile, exact, rounding, VALUE_DIM, DV, UNITS[4], WIDE, i * DV,
            )
    # All steps run again, a few keys each and for a part of the values' columns: with all columns
    # at once compilation takes an eighth longer.
    if is_inexact:
        PART: tl.constexpr = DV if DV < 32 else 32
        k_rows = rows_by_pointers(key_rows, k_strides, kv_b, kv_head, layouts, 1, DIM, D)
        v_rows = rows_by_pointers(value_rows, v_strides, kv_b, kv_head, layouts, 2, VALUE_DIM, DV)
        if sequences is not None:
            k_rows = keys_of_sequence(k_rows, sequences, own, k_scale, kv_head, PAGE)
            v_rows = keys_of_sequence(v_rows, sequences, own, v_scale, kv_head, PAGE)
        excess = tl.zeros([BLOCK_M], tl.float32)
        # The first columns run twice: the first time finds the largest scores as these products
        # round them, and its output is overwritten.
        for first_column in range(-PART, VALUE_DIM, PART):
            part_columns = tl.maximum(first_column, 0) + tl.arange(0, PART)
            highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            part = tl.zeros([BLOCK_M, PART], tl.float32)
            for careful_run in range(run, last_run):
                begin, run_end, run_full = bounded_run(
                    runs, careful_run, KV_BLOCK, kv_length, HAS_MASK,
                )
                for place in tl.range(begin, run_end, FEW, num_stages=1):
                    part, highest, row_sum = careful_step(
                        part, row_max, highest, row_sum, q, k_rows, v_rows, inputs, mods,
                        place, run_end, kv_length, part_columns, run_full,
                    )
            row_max = highest
            whole = row_sum
            if sinks is not None:
                top = natural_scores(row_max, scale, SCORED) * LOG2E
                whole = with_sink(row_sum, row_max, top, sink)
            part_values = divided(part, row_max, whole, inputs.dropout)
            store_part(
                o_base, o_strides, of_tile, there, part_columns, part_values, VALUE_DIM, UNITS[3],
                WIDE,
            )
            if WANT_REST:
                part_rounding = rounding_of(part_values, out.dtype.element_ty)
                store_part(
                    r_base, r_strides, of_tile, there, part_columns, part_rounding, VALUE_DIM,
                    UNITS[4], WIDE,
                )

    dead = is_dead(row_max, row_sum)
    at = bh.to(tl.int64) * q_length + first_row
    highest = natural_scores(row_max, scale, SCORED)
    if WANT_LSE:
        size = tl.log2(row_sum) + excess
        natural = tl.where(dead, float("-inf"), highest + size / LOG2E)
        tl.store(lse + at + of_tile, natural, mask=of_tile < there)
    if WANT_MAX:
        natural = tl.where(nans > 0, float("nan"), highest)
        tl.store(max_scores + at + of_tile, natural, mask=of_tile < there)
    if WANT_TOPS:
        tl.store(tops + (at + of_tile) * 2, row_max, mask=of_tile < there)
        size = tl.log2(whole) + excess
        tl.store(tops + (at + of_tile) * 2 + 1, size, mask=of_tile < there)
