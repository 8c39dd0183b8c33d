"""Attention forward for many query rows: a program takes one query tile over its row of runs.

FlashAttention-2's online softmax (Dao, 2023), in powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyflex_triton.column_parts import (
    add_products,
    any_strange,
    load_parts,
    load_row_parts,
    product_of_rows,
    scaled_rows,
    zeros_of_parts,
)
from anyflex_triton.tiles import (
    FAR,
    FEW,
    LOG2E,
    bounded_run,
    first_other_step,
    head_at,
    indices,
    is_far,
    load_part,
    long_steps,
    mask_row,
    masked_scores,
    next_other_step,
    store_part,
    store_rows,
    strange_sum,
    tensor_at,
    without_strange,
)

__all__ = [
    "final_scores",
    "forward_kernel",
    "natural_scores",
    "plain_score",
    "tile_of_program",
    "unit_of_scores",
]

CHAINS = tl.constexpr(16)
"""Parts of a row in which its largest score is found, where PARTS: the shortest step's keys."""
SUMS = tl.constexpr(8)
"""Sums of weights that a row has meanwhile, where PARTS: every eighth column of a product is the
same thread's."""

# Argument lists would be a line an argument.
# fmt: off


@triton.jit
def plain_score(score, b, h, q_idx, kv_idx, tables, ints, floats):
    """The score mod that is none, for scales that aren't positive."""
    return score


@triton.jit
def tile_of_program(index, tiles, heads, head_group):
    """(tile, head) of a program: a few heads at a time, whose keys the second cache holds, and of
    those the last tiles first, which under causal masks are the longest."""
    group = index // (head_group * tiles)
    first = group * head_group
    size = tl.minimum(head_group, heads - first)
    rest = index - first * tiles
    return tiles - 1 - rest // size, first + rest % size


@triton.jit
def final_scores(
    scores, masked, inside, full, b, h, q_idx, kv_idx, tables, ints, floats,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
):
    """Scores from q k^T, -inf at dead pairs (see `masked_scores`). They come scaled if there is a
    score mod; without, the scale is positive and waits: see `unit_of_scores`."""
    if SCORE_MOD is not None:
        scores = SCORE_MOD(scores, b, h, q_idx, kv_idx, tables, ints, floats)
    return masked_scores(
        scores, masked, inside, full, b, h, q_idx, kv_idx, tables, ints, floats, MASK_MOD,
    )


@triton.jit
def unit_of_scores(scale, SCORE_MOD: tl.constexpr):
    """What makes powers of two of `final_scores`."""
    if SCORE_MOD is None:
        return scale * LOG2E
    else:
        return LOG2E


@triton.jit
def natural_scores(scores, scale, SCORED: tl.constexpr):
    """`final_scores` as the user knows them; SCORED: there is a score mod."""
    if SCORED:
        return scores
    else:
        return scores * scale


@triton.jit
def largest_of_rows(scores, PARTS: tl.constexpr):
    """The largest of each row of scores [M, N]: [M]. In `tl.max` each of a thread's operations
    waits for the one before; those of PARTS don't."""
    if PARTS:
        parts = tl.reshape(scores, [scores.shape[0], scores.shape[1] // CHAINS, CHAINS])
        return tl.max(tl.max(parts, 1), 1)
    else:
        return tl.max(scores, 1)


@triton.jit
def added_to_rows(total, weights, alpha, PARTS: tl.constexpr):
    """Rows' sums of weights after one more step: [M], or where PARTS a thread's own, [M, SUMS],
    which are added up when the tile ends."""
    if PARTS:
        parts = tl.reshape(weights, [weights.shape[0], weights.shape[1] // SUMS, SUMS])
        return total * alpha[:, None] + tl.sum(parts, 1)
    else:
        return total * alpha + tl.sum(weights, 1)


@triton.jit
def add_values(
    acc, weights, alpha, value, v_base, v_strides, first, columns, end, VALUE_DIM: tl.constexpr,
    DV: tl.constexpr, UNIT: tl.constexpr, SCATTERED: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIBED: tl.constexpr, BOUND: tl.constexpr,
):
    """The sum after the values of one step; `alpha` scales what was there."""
    v = load_parts(
        value, v_base, v_strides, first, columns, end, VALUE_DIM, DV, UNIT, SCATTERED, WIDE, BOUND,
        DESCRIBED,
    )
    return add_products(scaled_rows(acc, alpha), weights.to(v[0].dtype), v, PRECISION)


@triton.jit
def forward_step(
    acc, weights, alpha, top, base, total, nans, q, key, value, k_base, v_base, k_strides,
    v_strides, first, before, columns, end, kv_length, masked, full, b, h, q_idx, shifts, tables,
    ints, floats, scale, READ_COLUMNS: tl.constexpr, SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, UNITS: tl.constexpr, SCATTERED: tl.constexpr, WIDE: tl.constexpr,
    WANT_MAX: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr, BOUND: tl.constexpr,
    OVERLAP: tl.constexpr, PARTS: tl.constexpr,
):
    """All sums after one more step, of the keys from `first` on.

    Args:
        acc: [M, DV] for each part.
        top: [M], the largest score so far.
        base: [M], top in powers of two, to which weights are relative.
        total: of weights, as `added_to_rows` returns it.
        nans: [M], where WANT_MAX: whether a score was NaN, which a maximum doesn't tell.
        weights, alpha, before: where OVERLAP, of the step before, whose values are added now.
        BOUND: whether keys past `end` are there.
        PARTS: of rows' largest scores and sums of weights.
    """
    k = load_parts(
        key, k_base, k_strides, first, columns, end, DIM, D, UNITS[1], SCATTERED[1], WIDE, BOUND,
        DESCRIBED,
    )
    raw = product_of_rows(q, k, PRECISION)
    if OVERLAP:
        acc = add_values(
            acc, weights, alpha, value, v_base, v_strides, before, columns, end, VALUE_DIM, DV,
            UNITS[2], SCATTERED[2], WIDE, PRECISION, DESCRIBED, BOUND,
        )
    keys = first + columns
    kv_idx = indices(first, columns, kv_length, shifts[3], BOUND, SCORE_MOD is not None)
    inside = (keys < end)[None, :] if BOUND else None
    if READ_COLUMNS is not None:
        tables = READ_COLUMNS(b, h, kv_idx, tables, ints, floats)
    if SCORE_MOD is not None:
        raw = raw * scale
    scores = final_scores(
        raw, masked, inside, full, b, h, q_idx, kv_idx[None, :], tables, ints, floats,
        SCORE_MOD, MASK_MOD,
    )
    if WANT_MAX:
        nans = tl.maximum(nans, tl.max((scores != scores).to(tl.int32), 1))
    unit = unit_of_scores(scale, SCORE_MOD)
    new_top = tl.maximum(top, largest_of_rows(scores, PARTS))
    new_base = new_top * unit
    # Below that nothing weighs anything beside what comes, or the row is far in the end.
    shift = tl.where(new_base <= -FAR, 0.0, new_base)
    weights = tl.exp2(scores * unit - shift[:, None])
    alpha = tl.exp2(base - shift)
    total = added_to_rows(total, weights, alpha, PARTS)
    if not OVERLAP:
        acc = add_values(
            acc, weights, alpha, value, v_base, v_strides, first, columns, end, VALUE_DIM, DV,
            UNITS[2], SCATTERED[2], WIDE, PRECISION, DESCRIBED, BOUND,
        )
    return acc, weights, alpha, new_top, new_base, total, nans


@triton.jit
def careful_step(
    acc, top, highest, total, q, k_rows, v_rows, k_strides, v_strides, keys, end, columns, full, b,
    h, q_idx, kv_length, shifts, tables, ints, floats, scale, READ_COLUMNS: tl.constexpr,
    SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    D: tl.constexpr, UNITS: tl.constexpr, SCATTERED: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(acc, highest, total) after one more step: the largest score, and sums of values and weights
    relative to `top`. What isn't finite reaches the rows that see it, and no other.

    Args:
        acc: [M, C], of the values' `columns`.
        top: [M], the largest score of all steps, or where that is yet to be found anything.
        highest: [M], of the steps so far.
    """
    k = load_row_parts(k_rows, k_strides, keys, end, DIM, D, UNITS[1], SCATTERED[1], WIDE)
    kv_idx = tl.minimum(keys, kv_length - 1) + shifts[3]
    if READ_COLUMNS is not None:
        tables = READ_COLUMNS(b, h, kv_idx, tables, ints, floats)
    scores = product_of_rows(q, k, PRECISION)
    if SCORE_MOD is not None:
        scores = scores * scale
    scores = final_scores(
        scores, True, (keys < end)[None, :], full, b, h, q_idx, kv_idx[None, :], tables, ints,
        floats, SCORE_MOD, MASK_MOD,
    )
    v = load_part(
        v_rows, v_strides, keys, end, columns, VALUE_DIM, UNITS[2], SCATTERED[2], WIDE
    )
    shift = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2((scores - shift[:, None]) * unit_of_scores(scale, SCORE_MOD))
    total += tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), without_strange(v), acc, input_precision=PRECISION)
    acc += strange_sum(scores != float("-inf"), v)
    return acc, tl.maximum(highest, tl.max(scores, 1)), total


@triton.jit
def is_dead(top, total):
    """Which rows have no live pair: their total is 0. NaN stays."""
    return (top == float("-inf")) & (total == total)


@triton.jit
def divided(acc, top, total):
    """A softmax's values; dead rows give 0."""
    dead = is_dead(top, total)
    acc = acc / tl.where(dead, 1.0, total)[:, None]
    return tl.where(dead[:, None], 0.0, acc)


@triton.jit
def rounding_of(values, dtype):
    """What rounding takes from values, and delta needs."""
    return without_strange(values - values.to(dtype).to(tl.float32))


@triton.jit
def forward_kernel(
    query, key, value, key_rows, value_rows, out, rest, tops, lse, max_scores, offsets, ends, runs,
    q_strides, k_strides, v_strides, o_strides, r_strides, mask_strides, tables, ints, floats,
    shifts, scale, batch_heads, heads, q_length, kv_length, tiles, head_group,
    READ_ROWS: tl.constexpr, READ_COLUMNS: tl.constexpr, SCORE_MOD: tl.constexpr,
    MASK_MOD: tl.constexpr, HAS_MASK: tl.constexpr, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr,
    GROUP: tl.constexpr, KV_SHARED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, UNITS: tl.constexpr, SCATTERED: tl.constexpr,
    WIDE: tl.constexpr, WANT_LSE: tl.constexpr, WANT_MAX: tl.constexpr, WANT_REST: tl.constexpr,
    WANT_TOPS: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr,
    BESIDE: tl.constexpr, MASK_READS: tl.constexpr, EVEN: tl.constexpr, OVERLAP: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One program a query tile of BLOCK_M rows of one query head.

    Args:
        D, DV: columns of a part (`column_parts`).
        query, key, value, out, rest: strides (b, h, row, column), all but the last in units of
            UNITS elements; the last counts where SCATTERED says so. rest is what rounding takes
            from out.
        tops: [B, Hq, L, 2], float32, for backward: each row's largest of `final_scores`, and the
            logarithm to base 2 of the sum of weights relative to that.
        lse, max_scores: [B, Hq, L], float32.
        offsets, ends, runs: the block mask's, rows by (b, h) strides `mask_strides`.
        shifts: added to b, h, q_idx, kv_idx before a mod sees them.
        tiles: of a head; batch_heads: B * Hq; head_group: heads that run at a time.
        Q_BLOCK, KV_BLOCK: the mask's. A tile never crosses its blocks.
        READ_ROWS, READ_COLUMNS: with them SCORE_MOD and MASK_MOD are those of read.
        MASK_READS: the mask mod reads what neither a row nor a key alone decides.
        EVEN: lengths, and the mask's blocks, are multiples of the tiles that this runs over.
        key_rows, value_rows: key and value by pointers, whatever DESCRIBED says.
        DESCRIBED: "host": key and value are descriptors of all rows of all heads, of tiles of
            BLOCK_N. "kernel": they are made here, of a head's rows. None: tiles come by pointers.
        BESIDE: of key and value, as in `head_at`.
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
        last_run = 1
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
    q = load_row_parts(q_base, q_strides, rows, end_row, DIM, D, UNITS[0], SCATTERED[0], WIDE)
    # What mods see. Rows past the end read as the last one would.
    mod_b = b + shifts[0]
    mod_h = h + shifts[1]
    q_idx = tl.minimum(rows, q_length - 1)[:, None] + shifts[2]
    if READ_ROWS is not None:
        tables = READ_ROWS(mod_b, mod_h, q_idx, tables, ints, floats)
    columns = tl.arange(0, BLOCK_N)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    base = top
    total = tl.zeros([BLOCK_M, SUMS] if PARTS else [BLOCK_M], tl.float32)
    nans = tl.zeros([BLOCK_M], tl.int32)
    acc = zeros_of_parts(BLOCK_M, VALUE_DIM, DV)

    others = 0

    # Long FULL runs but for their last step: no pair is dead.
    for r in range(run, last_run):
        begin, run_end, run_full = bounded_run(runs, r, KV_BLOCK, kv_length, HAS_MASK)
        steps = long_steps(begin, run_end, run_full, BLOCK_N)
        others += (run_end - begin + BLOCK_N - 1) // BLOCK_N - steps
        # Where OVERLAP, the weights of a step meet their values while the next step's weights are
        # made (FlashAttention-3: Shah et al., 2024). At first there are none.
        weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        alpha = tl.full([BLOCK_M], 1.0, tl.float32)
        for step in range(steps):
            first = begin + step * BLOCK_N
            before = begin + tl.maximum(step - 1, 0) * BLOCK_N
            acc, weights, alpha, top, base, total, nans = forward_step(
                acc, weights, alpha, top, base, total, nans, q, key, value, k_base, v_base,
                k_strides, v_strides, first, before, columns, 0, kv_length, None, True, mod_b,
                mod_h, q_idx, shifts, tables, ints, floats, scale, READ_COLUMNS, SCORE_MOD,
                MASK_MOD, DIM, VALUE_DIM, D, DV, UNITS, SCATTERED, WIDE, WANT_MAX, PRECISION,
                DESCRIBED, False, OVERLAP, PARTS,
            )
        # Two questions: together with a constant the second would be no branch.
        if OVERLAP:  # noqa: SIM102
            if steps > 0:
                acc = add_values(
                    acc, weights, alpha, value, v_base, v_strides, begin + (steps - 1) * BLOCK_N,
                    columns, 0, VALUE_DIM, DV, UNITS[2], SCATTERED[2], WIDE, PRECISION, DESCRIBED,
                    False,
                )

    # PARTIAL runs, and the rest of the others, in one loop, for each begins with a wait. Their
    # steps were counted above, and `_once` is no `if`: else ptxas makes products wait for each
    # other (C7515), and Triton fails to compile forward for Blackwell.
    r = run
    first, end, full = first_other_step(
        runs, run, last_run, KV_BLOCK, kv_length, BLOCK_N, HAS_MASK,
    )
    weights = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    alpha = tl.full([BLOCK_M], 1.0, tl.float32)
    for _once in range(tl.minimum(others, 1)):
        for _step in range(others):
            mask_full = full
            if EVEN and not MASK_READS:
                masked = None if MASK_MOD is None else not full
                mask_full = None
            elif MASK_READS:
                # Behind a branch Triton would take another layout for all scores.
                masked = True
            else:
                masked = (not full) | (first + BLOCK_N > end)
            acc, weights, alpha, top, base, total, nans = forward_step(
                acc, weights, alpha, top, base, total, nans, q, key, value, k_base, v_base,
                k_strides, v_strides, first, first, columns, end, kv_length, masked, mask_full,
                mod_b, mod_h, q_idx, shifts, tables, ints, floats, scale, READ_COLUMNS, SCORE_MOD,
                MASK_MOD, DIM, VALUE_DIM, D, DV, UNITS, SCATTERED, WIDE, WANT_MAX, PRECISION,
                DESCRIBED, not EVEN, False, PARTS,
            )
            r, first, end, full = next_other_step(
                runs, r, last_run, first, end, full, KV_BLOCK, kv_length, BLOCK_N, HAS_MASK,
            )

    if PARTS:
        total = tl.sum(total, 1)
    SCORED: tl.constexpr = SCORE_MOD is not None
    # What rounding added to the base: weights are relative to it, not to top.
    excess = tl.fma(top, 0.0 - unit_of_scores(scale, SCORE_MOD), base)
    # A value that isn't finite has reached rows that don't see it too: 0 * NaN is NaN. And weights
    # of far rows are none. Asked before the sums are stored, which then need no registers.
    odd = any_strange(acc) | is_far(top, base).to(tl.int32)
    is_odd = tl.max(odd, 0) > 0
    # Counted from the tile's first row: places as the query's above would be kept in registers
    # through all loops.
    of_tile = tl.arange(0, BLOCK_M)
    there = end_row - first_row
    o_base = tensor_at(out, o_strides, b, h, UNITS[3])
    o_base += first_row.to(tl.int64) * o_strides[2] * UNITS[3]
    r_base = tensor_at(rest, r_strides, b, h, UNITS[4])
    r_base += first_row.to(tl.int64) * r_strides[2] * UNITS[4]
    right = tl.where(is_odd, 0, there)
    for i in tl.static_range(len(acc)):
        values = divided(acc[i], top, total)
        store_rows(
            o_base, o_strides, of_tile, right, values, VALUE_DIM, DV, UNITS[3], WIDE, i * DV,
        )
        if WANT_REST:
            rounding = rounding_of(values, out.dtype.element_ty)
            store_rows(
                r_base, r_strides, of_tile, right, rounding, VALUE_DIM, DV, UNITS[4], WIDE, i * DV,
            )
    # All steps again, a few keys each and for a part of the values' columns: with all columns at
    # once the compiler takes an eighth longer.
    if is_odd:
        few = tl.arange(0, FEW)
        PART: tl.constexpr = DV if DV < 32 else 32
        k_rows = tensor_at(key_rows, k_strides, kv_b, kv_head, UNITS[1])
        v_rows = tensor_at(value_rows, v_strides, kv_b, kv_head, UNITS[2])
        excess = tl.zeros([BLOCK_M], tl.float32)
        # The first columns twice: the first time finds the largest scores, as these products have
        # them, and what it writes is written again.
        for first_column in range(-PART, VALUE_DIM, PART):
            part_columns = tl.maximum(first_column, 0) + tl.arange(0, PART)
            highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            sums = tl.zeros([BLOCK_M, PART], tl.float32)
            for careful_run in range(run, last_run):
                begin, run_end, run_full = bounded_run(
                    runs, careful_run, KV_BLOCK, kv_length, HAS_MASK,
                )
                for place in tl.range(begin, run_end, FEW, num_stages=1):
                    sums, highest, total = careful_step(
                        sums, top, highest, total, q, k_rows, v_rows, k_strides, v_strides,
                        place + few, run_end, part_columns, run_full, mod_b, mod_h, q_idx,
                        kv_length, shifts, tables, ints, floats, scale, READ_COLUMNS, SCORE_MOD,
                        MASK_MOD, DIM, VALUE_DIM, D, UNITS, SCATTERED, WIDE, PRECISION,
                    )
            top = highest
            part_values = divided(sums, top, total)
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

    dead = is_dead(top, total)
    at = bh.to(tl.int64) * q_length + first_row
    size = tl.log2(total) + excess
    highest = natural_scores(top, scale, SCORED)
    if WANT_LSE:
        natural = tl.where(dead, float("-inf"), highest + size / LOG2E)
        tl.store(lse + at + of_tile, natural, mask=of_tile < there)
    if WANT_MAX:
        natural = tl.where(nans > 0, float("nan"), highest)
        tl.store(max_scores + at + of_tile, natural, mask=of_tile < there)
    if WANT_TOPS:
        tl.store(tops + (at + of_tile) * 2, top, mask=of_tile < there)
        tl.store(tops + (at + of_tile) * 2 + 1, size, mask=of_tile < there)
