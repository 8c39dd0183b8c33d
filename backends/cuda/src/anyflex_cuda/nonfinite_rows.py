"""Second computation of tiles with non-finite values or far rows.

Non-finite values must not reach rows that don't see them, but 0 * NaN is NaN. Scores of far rows
are so large that weights must be computed from their differences. Both are rare, so this code
reads and writes by pointers and takes a few columns at a time, with fewer registers than the main
loops.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from anyflex_cuda.write_softmax_stats import natural_base, with_sinks
from anyflex_triton.device_functions import (
    ModInputs,
    bounded_run,
    mask_row,
    masked_scores,
    nonfinite,
    nonfinite_counts,
    pages_of_sequence,
    record,
    sum_of_counts,
    unit_of_scores,
)

__all__ = [
    "KEYS",
    "PART",
    "PointedRows",
    "load_part",
    "place_of",
    "seen_nonfinite",
    "write_nonfinite_rows",
]


@record
class PointedRows:
    """Rows of one head, addressed by a pointer to the first.

    Attributes:
        stride: elements from a row to the next.
        DIM: number of columns.
        pages: `anyflex_triton.kernel_records.Pages` where they are keys in pages; then page_stride
            is what lies from a page to the next, and base a pointer to the first page.
    """

    base: Any
    stride: Any
    DIM: Any
    pages: Any = None
    page_stride: Any = None


# Argument lists would be a line an argument.
# fmt: off

KEYS = gl.constexpr(16)
"""Number of keys per step."""
PART = gl.constexpr(32)
"""Default number of columns computed at a time."""


@gluon.jit
def place_of(strides, b, h):
    """Return the offset of the first element of (b, h)."""
    return gl.cast(b, gl.int64) * strides[0] + gl.cast(h, gl.int64) * strides[1]


@gluon.jit
def load_part(
    pointed, first, end, first_column, ROWS: gl.constexpr, LAYOUT: gl.constexpr,
    TRANSPOSED: gl.constexpr, COLUMNS: gl.constexpr = PART,
):
    """Load [ROWS, COLUMNS] of `PointedRows` from a row and a column on, or its transpose; 0 from
    row `end` and from column DIM on."""
    if TRANSPOSED:
        rows = gl.expand_dims(first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT)), 0)
        columns = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    else:
        rows = gl.expand_dims(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), 1)
        columns = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT)), 0)
    columns += first_column
    if pointed.pages is None:
        at = pointed.base + rows.to(gl.int64) * pointed.stride + columns
    else:
        page = gl.load(
            pointed.pages.table + rows // pointed.pages.SIZE, mask=rows < end, other=0,
        )
        page = gl.maximum(gl.minimum(page, pointed.pages.last), 0).to(gl.int64)
        row = (rows % pointed.pages.SIZE).to(gl.int64)
        at = pointed.base + page * pointed.page_stride + row * pointed.stride + columns
    return gl.load(at, mask=(rows < end) & (columns < pointed.DIM), other=0.0)


@gluon.jit
def seen_nonfinite(seen, v, LAYOUT: gl.constexpr, ROWS: gl.constexpr):
    """Return [ROWS, columns], the sum of the non-finite values in v over the keys that a row sees:
    0, an infinity, or NaN.

    Args:
        seen: [ROWS, KEYS], in LAYOUT; v: [KEYS, columns], its right operand.
    """
    count = mma_v2(
        gl.convert_layout(seen.to(gl.float16), gl.DotOperandLayout(0, LAYOUT, 2)),
        nonfinite_counts(v), gl.full([ROWS, v.shape[1]], 0.0, gl.float32, layout=LAYOUT),
    )
    return sum_of_counts(count)


@gluon.jit
def add_nonfinite_step(
    acc, highest, row_sum, shift, unit, queries, keys, values, first_row, q_length, first, end,
    full, first_column, inputs, kv_length, mods, ROWS: gl.constexpr, LAYOUT: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Return (acc, highest, row_sum) after KEYS more keys: accumulator of some columns of values,
    largest score, and sum of weights, which are relative to `shift`.

    This is a separate function because Triton visits the body of a loop inside two others eight
    times.

    Args:
        queries, keys, values: `PointedRows`.
        inputs, mods: `ModInputs` and `Mods` of `anyflex_triton.kernel_records`.
    """
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    scores = gl.full([ROWS, KEYS], 0.0, gl.float32, layout=LAYOUT)
    for d in range(0, keys.DIM, COLUMNS):
        q = load_part(queries, first_row, q_length, d, ROWS, LEFT, False, COLUMNS)
        k = load_part(keys, first, end, d, KEYS, RIGHT, True, COLUMNS)
        scores = mma_v2(q, k, scores)
    places = gl.expand_dims(first + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT)), 0)
    kv_idx = gl.minimum(places, kv_length - 1) + mods.shifts[3]
    if mods.SCORE_MOD is not None:
        scores = mods.SCORE_MOD(
            scores * mods.scale, inputs.b, inputs.h, inputs.q_idx, kv_idx, inputs.tables,
            mods.ints, mods.floats,
        )
    scores = masked_scores(
        scores, True, places < end, full, inputs.b, inputs.h, inputs.q_idx, kv_idx, inputs.tables,
        mods.ints, mods.floats, mods.MASK_MOD,
    )
    highest = gl.maximum(highest, gl.max(scores, 1))
    weights = gl.exp2((scores - shift) * unit)
    row_sum += gl.sum(weights, 1)
    v = load_part(values, first, end, first_column, KEYS, RIGHT, False, COLUMNS)
    finite = gl.where(nonfinite(v), 0.0, v.to(gl.float32)).to(v.dtype)
    acc = mma_v2(gl.convert_layout(weights.to(v.dtype), LEFT), finite, acc)
    acc += seen_nonfinite(scores != float("-inf"), v, LAYOUT, ROWS)
    return acc, highest, row_sum


@gluon.jit
def keys_of(tensor, strides, b, h, first, pages, DIM: gl.constexpr):
    """Return the `PointedRows` of one head's keys or values.

    Args:
        first: row that counts as the first one, or None.
        pages: as in `PointedRows`.
    """
    base = tensor + place_of(strides, b, h)
    if pages is None and first is not None:
        base += gl.cast(first, gl.int64) * strides[2]
    return PointedRows(
        base=base, stride=strides[2], DIM=DIM, pages=pages, page_stride=strides[0],
    )


@gluon.jit
def write_nonfinite_rows(
    tensors, mask, mods, tables, results, b, h, first_row, q_length, kv_length,
    ROWS: gl.constexpr, SUMS_LAYOUT: gl.constexpr, COLUMNS: gl.constexpr = PART, own=None,
    sequences=None, PAGE: gl.constexpr = 0,
):
    """Write out and rest of ROWS rows from `first_row` on. Return each row's largest of
    `final_scores` and the sum of weights relative to it, without and with the sink, in
    SUMS_LAYOUT.

    Args:
        tensors, mask: `PointedTensors` and `MaskRuns`.
        mods, results: `Mods` and `RowResults` of `anyflex_triton.kernel_records`.
        COLUMNS: number of columns computed at a time.
        own: the `anyflex_triton.sequences.SequenceTile` that the rows are in, whose `end_row` and
            `kv_length` are q_length and kv_length; None where queries aren't packed.
        sequences, PAGE: see `anyflex_triton.kernel_arguments`.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8],
    )
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    VALUE_DIM: gl.constexpr = tensors.VALUE_DIM
    mod_b = b + mods.shifts[0]
    q_shift = mods.shifts[2]
    pages = None
    if own is None:
        first_key = None
    else:
        mod_b += own.b
        q_shift += own.shift
        first_key = own.kv_begin
        if PAGE > 0:
            pages = pages_of_sequence(sequences, own.owner, PAGE)
    if mask.HAS_MASK:
        block = first_row // mask.Q_BLOCK if own is None else own.row
        run, last_run = mask_row(mask.offsets, mask.ends, mask.strides, b, h, block)
    else:
        run = gl.to_tensor(0)
        last_run = gl.to_tensor(1)
    kv_b = 0 * b if tensors.KV_SHARED else b
    queries = PointedRows(
        base=tensors.query + place_of(tensors.q_strides, b, h), stride=tensors.q_strides[2],
        DIM=tensors.DIM,
    )
    kv_head = h // tensors.GROUP
    keys = keys_of(tensors.key, tensors.k_strides, kv_b, kv_head, first_key, pages, tensors.DIM)
    values = keys_of(tensors.value, tensors.v_strides, kv_b, kv_head, first_key, pages, VALUE_DIM)
    rows = gl.expand_dims(first_row + gl.arange(0, ROWS, layout=OF_ROWS), 1)
    q_idx = gl.minimum(rows, q_length - 1) + q_shift
    inputs = ModInputs(b=mod_b, h=h + mods.shifts[1], q_idx=q_idx, kv_idx=None, tables=tables)
    unit = unit_of_scores(mods.scale, mods.SCORE_MOD)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=OF_ROWS)
    row_sum = gl.full([ROWS], 0.0, gl.float32, layout=OF_ROWS)
    whole = row_sum
    # The first columns are computed twice. The first time finds the largest scores, as these
    # products have them; what it writes is overwritten.
    for column in range(-COLUMNS, VALUE_DIM, COLUMNS):
        first_column = gl.maximum(column, 0)
        highest = gl.full([ROWS], float("-inf"), gl.float32, layout=OF_ROWS)
        shift = gl.expand_dims(gl.where(row_max == float("-inf"), 0.0, row_max), 1)
        row_sum = gl.full([ROWS], 0.0, gl.float32, layout=OF_ROWS)
        acc = gl.full([ROWS, COLUMNS], 0.0, gl.float32, layout=LAYOUT)
        for r in range(run, last_run):
            begin, end, full = bounded_run(
                mask.runs, r, mask.KV_BLOCK, kv_length, mask.HAS_MASK,
            )
            for first in range(begin, end, KEYS):
                acc, highest, row_sum = add_nonfinite_step(
                    acc, highest, row_sum, shift, unit, queries, keys, values, first_row, q_length,
                    first, end, full, first_column, inputs, kv_length, mods, ROWS, LAYOUT, COLUMNS,
                )
        row_max = highest
        # A row without a live pair has row_sum 0 and gives 0. NaN stays NaN.
        dead = (row_max == float("-inf")) & (row_sum == row_sum)
        base = natural_base(row_max, mods.scale, results)
        whole = with_sinks(row_sum, row_max, base, h, results)
        inverse = 1.0 / gl.where(dead, 1.0, whole)
        acc = gl.where(gl.expand_dims(dead, 1), 0.0, acc * gl.expand_dims(inverse, 1))
        columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
        columns = gl.expand_dims(first_column + columns, 0)
        there = (rows < q_length) & (columns < VALUE_DIM)
        rounded = acc.to(tensors.out.dtype.element_ty)
        at = place_of(tensors.o_strides, b, h) + rows.to(gl.int64) * tensors.o_strides[2] + columns
        gl.store(tensors.out + at, rounded, mask=there)
        if tensors.WANT_REST:
            lost = acc - rounded.to(gl.float32)
            lost = gl.where(nonfinite(lost), 0.0, lost)
            at = place_of(tensors.r_strides, b, h)
            at = at + rows.to(gl.int64) * tensors.r_strides[2] + columns
            gl.store(tensors.rest + at, lost.to(tensors.rest.dtype.element_ty), mask=there)
    found = gl.convert_layout(row_max, SUMS_LAYOUT), gl.convert_layout(row_sum, SUMS_LAYOUT)
    return found[0], found[1], gl.convert_layout(whole, SUMS_LAYOUT)
