"""Out of a tile whose values aren't all finite, anew: rows that don't see such a value must not
have it, and 0 * NaN is NaN. And of a tile with far rows, whose scores are so large that weights
must be made of their differences.

It happens rarely. So this reads and writes by pointers, needs nobody's help, and takes a few
columns at a time, with fewer registers than the loops before it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from anyflex_triton.device_functions import (
    bounded_run,
    mask_row,
    masked_scores,
    strange,
    strange_counts,
    sum_of_counts,
    unit_of_scores,
)

__all__ = ["KEYS", "PART", "load_part", "place_of", "seen_strange", "write_strange_rows"]

# Argument lists would be a line an argument.
# fmt: off

KEYS = gl.constexpr(16)
"""Of a step."""
PART = gl.constexpr(32)
"""Columns at a time, where nothing else is said."""


@gluon.jit
def place_of(strides, b, h):
    """The first element of (b, h)."""
    return gl.cast(b, gl.int64) * strides[0] + gl.cast(h, gl.int64) * strides[1]


@gluon.jit
def load_part(
    base, stride, first, end, first_column, DIM: gl.constexpr, ROWS: gl.constexpr,
    LAYOUT: gl.constexpr, TRANSPOSED: gl.constexpr, COLUMNS: gl.constexpr = PART,
):
    """[ROWS, COLUMNS] from a row and a column on, or its transpose; 0 from `end` and from DIM
    on."""
    if TRANSPOSED:
        rows = gl.expand_dims(first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT)), 0)
        columns = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    else:
        rows = gl.expand_dims(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), 1)
        columns = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT)), 0)
    columns += first_column
    at = base + rows.to(gl.int64) * stride + columns
    return gl.load(at, mask=(rows < end) & (columns < DIM), other=0.0)


@gluon.jit
def seen_strange(seen, v, LAYOUT: gl.constexpr, ROWS: gl.constexpr):
    """Sums [ROWS, columns] over keys that a row sees of what isn't finite in v: 0, an infinity,
    NaN.

    Args:
        seen: [ROWS, KEYS], in LAYOUT; v: [KEYS, columns], its right operand.
    """
    count = mma_v2(
        gl.convert_layout(seen.to(gl.float16), gl.DotOperandLayout(0, LAYOUT, 2)),
        strange_counts(v), gl.full([ROWS, v.shape[1]], 0.0, gl.float32, layout=LAYOUT),
    )
    return sum_of_counts(count)


@gluon.jit
def add_strange_step(
    acc, highest, total, shift, unit, q_base, k_base, v_base, q_stride, k_stride, v_stride,
    first_row, q_length, first, end, full, first_column, b, h, q_idx, kv_length, tables, ints,
    floats, shifts, scale, SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr, COLUMNS: gl.constexpr,
):
    """(acc, highest, total) after KEYS keys more: sums of some columns of values and of weights,
    which are relative to `shift`, and the largest score.

    A function of its own, for Triton walks through the body of a loop in two others eight times.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    scores = gl.full([ROWS, KEYS], 0.0, gl.float32, layout=LAYOUT)
    for d in range(0, DIM, COLUMNS):
        q = load_part(q_base, q_stride, first_row, q_length, d, DIM, ROWS, LEFT, False, COLUMNS)
        k = load_part(k_base, k_stride, first, end, d, DIM, KEYS, RIGHT, True, COLUMNS)
        scores = mma_v2(q, k, scores)
    keys = gl.expand_dims(first + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT)), 0)
    kv_idx = gl.minimum(keys, kv_length - 1) + shifts[3]
    if SCORE_MOD is not None:
        scores = SCORE_MOD(scores * scale, b, h, q_idx, kv_idx, tables, ints, floats)
    scores = masked_scores(
        scores, True, keys < end, full, b, h, q_idx, kv_idx, tables, ints, floats, MASK_MOD,
    )
    highest = gl.maximum(highest, gl.max(scores, 1))
    weights = gl.exp2((scores - shift) * unit)
    total += gl.sum(weights, 1)
    v = load_part(
        v_base, v_stride, first, end, first_column, VALUE_DIM, KEYS, RIGHT, False, COLUMNS,
    )
    finite = gl.where(strange(v), 0.0, v.to(gl.float32)).to(v.dtype)
    acc = mma_v2(gl.convert_layout(weights.to(v.dtype), LEFT), finite, acc)
    acc += seen_strange(scores != float("-inf"), v, LAYOUT, ROWS)
    return acc, highest, total


@gluon.jit
def write_strange_rows(
    query, key, value, out, rest, q_strides, k_strides, v_strides, o_strides, r_strides, offsets,
    ends, runs, mask_strides, b, h, first_row, q_length, kv_length, tables, ints, floats, shifts,
    scale, SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, HAS_MASK: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, GROUP: gl.constexpr, KV_SHARED: gl.constexpr,
    DIM: gl.constexpr, VALUE_DIM: gl.constexpr, ROWS: gl.constexpr, WANT_REST: gl.constexpr,
    SUMS_LAYOUT: gl.constexpr, COLUMNS: gl.constexpr = PART,
):
    """Writes out, and rest, of ROWS rows from `first_row` on. Returns of each the largest of
    `final_scores` and the sum of weights relative to it, in SUMS_LAYOUT.

    Args:
        query, key, value, out, rest: strides (b, h, row) in elements; columns are contiguous.
        COLUMNS: at a time.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8],
    )
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if HAS_MASK:
        run, last_run = mask_row(offsets, ends, mask_strides, b, h, first_row // Q_BLOCK)
    else:
        run = gl.to_tensor(0)
        last_run = gl.to_tensor(1)
    kv_b = 0 * b if KV_SHARED else b
    q_base = query + place_of(q_strides, b, h)
    k_base = key + place_of(k_strides, kv_b, h // GROUP)
    v_base = value + place_of(v_strides, kv_b, h // GROUP)
    rows = gl.expand_dims(first_row + gl.arange(0, ROWS, layout=OF_ROWS), 1)
    q_idx = gl.minimum(rows, q_length - 1) + shifts[2]
    mod_b = b + shifts[0]
    mod_h = h + shifts[1]
    unit = unit_of_scores(scale, SCORE_MOD)
    top = gl.full([ROWS], float("-inf"), gl.float32, layout=OF_ROWS)
    total = gl.full([ROWS], 0.0, gl.float32, layout=OF_ROWS)
    # The first columns twice: the first time finds the largest scores, as these products have
    # them, and what it writes is written again.
    for column in range(-COLUMNS, VALUE_DIM, COLUMNS):
        first_column = gl.maximum(column, 0)
        highest = gl.full([ROWS], float("-inf"), gl.float32, layout=OF_ROWS)
        shift = gl.expand_dims(gl.where(top == float("-inf"), 0.0, top), 1)
        total = gl.full([ROWS], 0.0, gl.float32, layout=OF_ROWS)
        acc = gl.full([ROWS, COLUMNS], 0.0, gl.float32, layout=LAYOUT)
        for r in range(run, last_run):
            begin, end, full = bounded_run(runs, r, KV_BLOCK, kv_length, HAS_MASK)
            for first in range(begin, end, KEYS):
                acc, highest, total = add_strange_step(
                    acc, highest, total, shift, unit, q_base, k_base, v_base, q_strides[2],
                    k_strides[2], v_strides[2], first_row, q_length, first, end, full,
                    first_column, mod_b, mod_h, q_idx, kv_length, tables, ints, floats, shifts,
                    scale, SCORE_MOD, MASK_MOD, DIM, VALUE_DIM, ROWS, LAYOUT, COLUMNS,
                )
        top = highest
        # A row without a live pair has 0 here, and gives 0. NaN stays.
        dead = (top == float("-inf")) & (total == total)
        inverse = 1.0 / gl.where(dead, 1.0, total)
        acc = gl.where(gl.expand_dims(dead, 1), 0.0, acc * gl.expand_dims(inverse, 1))
        columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
        columns = gl.expand_dims(first_column + columns, 0)
        there = (rows < q_length) & (columns < VALUE_DIM)
        rounded = acc.to(out.dtype.element_ty)
        at = place_of(o_strides, b, h) + rows.to(gl.int64) * o_strides[2] + columns
        gl.store(out + at, rounded, mask=there)
        if WANT_REST:
            lost = acc - rounded.to(gl.float32)
            lost = gl.where(strange(lost), 0.0, lost)
            at = place_of(r_strides, b, h) + rows.to(gl.int64) * r_strides[2] + columns
            gl.store(rest + at, lost.to(rest.dtype.element_ty), mask=there)
    return gl.convert_layout(top, SUMS_LAYOUT), gl.convert_layout(total, SUMS_LAYOUT)
