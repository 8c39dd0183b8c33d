"""Pieces of the kernels: loads of rows, the block mask's rows, non-finite values.

All kernels are written for any Triton target: pointers with masks, no inline assembly, no atomics
but for gradients of captured tensors. Shapes: a tile of scores is [M, N], M query rows, N keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "FAR",
    "FEW",
    "FULL",
    "LOG2E",
    "PARTIAL",
    "bounded_run",
    "first_other_step",
    "head_at",
    "indices",
    "is_far",
    "load_part",
    "load_rows",
    "load_tile",
    "long_steps",
    "mask_row",
    "masked_scores",
    "next_other_step",
    "nonfinite",
    "nonfinite_counts",
    "nonfinite_sum",
    "row_offsets",
    "store_part",
    "store_rows",
    "sum_of_counts",
    "tensor_at",
    "without_nonfinite",
]

# Argument lists would be a line an argument.
# fmt: off

LOG2E = tl.constexpr(1.4426950408889634)
FULL = tl.constexpr(1)
"""A run's kind, as `anyflex.plugin.FULL`."""
PARTIAL = tl.constexpr(2)
"""A run's kind, as `anyflex.plugin.PARTIAL`."""
FAR = tl.constexpr(1048576.0)
"""In powers of two. Weights are 2^(score * unit - base), where a row's base is its largest score
times unit as that is rounded: all weights of a row are off by one factor then, which the softmax
divides out. From here on that factor may be far from 1, from 2^30 no float holds it, and the
product overflows for such scores as the lowest float, of which masks are made."""
FEW = tl.constexpr(16)
"""Rows or keys of a step where a value is non-finite or a row is far: as few as products take.
Such steps hardly ever run, so that their compile time counts and not their speed."""
LONG = tl.constexpr(4)
"""Steps: each loop begins with a wait, but its steps are shorter without a mask's code."""


@triton.jit
def tensor_at(pointer, strides, b, h, UNIT: tl.constexpr):
    """The first row of (b, h) of a tensor whose strides are counted in UNIT elements."""
    return pointer + (b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]) * UNIT


@triton.jit
def head_at(
    tensor, strides, b, h, heads, length, UNIT: tl.constexpr, DESCRIBED: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """Where the rows of (b, h) begin: a pointer, or where one descriptor covers all heads,
    DESCRIBED is "host", (row, column) in it.

    Args:
        BESIDE: heads lie beside each other in the descriptor's rows, else one after the other.
    """
    if DESCRIBED != "host":
        return tensor_at(tensor, strides, b, h, UNIT)
    elif BESIDE:
        return b * length, (h * strides[1] * UNIT).to(tl.int32)
    else:
        return (b * heads + h) * length, 0


@triton.jit
def row_offsets(
    rows, columns, strides, UNIT: tl.constexpr, SCATTERED: tl.constexpr, WIDE: tl.constexpr
):
    """Offsets [rows, columns] of elements within one (b, h)."""
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    columns = columns.to(INDEX)
    if SCATTERED:
        columns = columns * strides[3].to(INDEX)
    return rows.to(INDEX)[:, None] * (strides[2].to(INDEX) * UNIT) + columns[None, :]


@triton.jit
def indices(first, places, length, shift, BOUND: tl.constexpr, SCORED: tl.constexpr):
    """What mods see of the rows or keys first + places.

    Args:
        BOUND: those past the end are there, and read as the last one would.
        SCORED: a score mod sees them, in steps without a mask too.
    """
    if BOUND:
        return tl.minimum(first + places, length - 1) + shift
    elif SCORED:
        # A minimum that changes nothing: else both numbers are added to each place one by one,
        # and what loops have in common is kept in registers. A mask alone takes less without.
        return places + tl.minimum(first + shift, 0x7FFFFFFE)
    else:
        return first + places + shift


@triton.jit
def is_far(top, base):
    """Which rows' weights must be made of score - top, which loses nothing that scores have.

    Args:
        top: finite, or the row has no score that is.
        base: top in powers of two.
    """
    return (tl.abs(base) >= FAR) & (tl.abs(top) < float("inf"))


@triton.jit
def load_rows(
    base, strides, rows, end, DIM: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr,
    SCATTERED: tl.constexpr, WIDE: tl.constexpr, BOUND: tl.constexpr, FIRST: tl.constexpr = 0,
):
    """Rows of one (b, h), D columns from FIRST on; 0 past `end` where BOUND, and in columns from
    DIM on."""
    columns = FIRST + tl.arange(0, D)
    offsets = row_offsets(rows, columns, strides, UNIT, SCATTERED, WIDE)
    if BOUND and FIRST + D > DIM:
        inside = (rows < end)[:, None] & (columns < DIM)[None, :]
        return tl.load(base + offsets, mask=inside, other=0.0)
    if BOUND:
        return tl.load(base + offsets, mask=(rows < end)[:, None], other=0.0)
    if FIRST + D > DIM:
        return tl.load(base + offsets, mask=(columns < DIM)[None, :], other=0.0)
    return tl.load(base + offsets)


@triton.jit
def load_part(
    base, strides, rows, end, columns, DIM: tl.constexpr, UNIT: tl.constexpr,
    SCATTERED: tl.constexpr, WIDE: tl.constexpr,
):
    """Some columns of rows of one (b, h); 0 past `end`, and in columns from DIM on."""
    offsets = row_offsets(rows, columns, strides, UNIT, SCATTERED, WIDE)
    inside = (rows < end)[:, None] & (columns < DIM)[None, :]
    return tl.load(base + offsets, mask=inside, other=0.0)


@triton.jit
def load_tile(
    tensor, base, strides, first, rows, end, DIM: tl.constexpr, D: tl.constexpr,
    UNIT: tl.constexpr, SCATTERED: tl.constexpr, WIDE: tl.constexpr, BOUND: tl.constexpr,
    DESCRIBED: tl.constexpr, FIRST: tl.constexpr = 0,
):
    """Rows of one (b, h), from row `first` on, D columns from FIRST on.

    Where DESCRIBED, `tensor` is a descriptor: "host", of all rows of all heads, which TMA loads
    without a register; "kernel", of this head's alone. `base` is what `head_at` returns. Past
    `end` it gives rows of the next head, batch entry or block, or 0: they are dead pairs' all the
    same.
    """
    if DESCRIBED is not None:
        if DESCRIBED == "host":
            return tensor.load([base[0] + first, base[1] + FIRST])
        else:
            return tensor.load([first, FIRST])
    else:
        return load_rows(
            base, strides, first + rows, end, DIM, D, UNIT, SCATTERED, WIDE, BOUND, FIRST,
        )


@triton.jit
def store_rows(
    base, strides, rows, end, value, DIM: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr, FIRST: tl.constexpr = 0,
):
    """Stores rows before `end`, columns from FIRST on and before DIM; the last stride is 1."""
    columns = FIRST + tl.arange(0, D)
    offsets = row_offsets(rows, columns, strides, UNIT, False, WIDE)
    inside = (rows < end)[:, None]
    if FIRST + D > DIM:
        inside = inside & (columns < DIM)[None, :]
    tl.store(base + offsets, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def store_part(
    base, strides, rows, end, columns, value, DIM: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`store_rows`, of some columns."""
    offsets = row_offsets(rows, columns, strides, UNIT, False, WIDE)
    inside = (rows < end)[:, None] & (columns < DIM)[None, :]
    tl.store(base + offsets, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def mask_row(offsets, ends, mask_strides, b, h, row):
    """Where the runs of a row of blocks begin and end."""
    at = b * mask_strides[0] + h * mask_strides[1] + row
    return tl.load(offsets + at), tl.load(ends + at)


@triton.jit
def bounded_run(runs, run, BLOCK: tl.constexpr, length, HAS_MASK: tl.constexpr):
    """A run in elements, not past `length`, and whether it is FULL; without a mask, all."""
    if HAS_MASK:
        at = runs + run * 3
        end = tl.minimum(tl.load(at + 1) * BLOCK, length)
        return tl.load(at) * BLOCK, end, tl.load(at + 2) == FULL
    else:
        return 0, length, True


@triton.jit
def long_steps(begin, end, full, STEP: tl.constexpr):
    """Steps of a FULL run that are worth a loop of their own, without any mask's code: all but the
    last, so that every run has one left. 0 for the other runs."""
    steps = (end - begin - 1) // STEP
    return tl.where(full & (steps >= LONG), steps, 0)


@triton.jit
def first_other_step(
    runs, run, last_run, BLOCK: tl.constexpr, length, STEP: tl.constexpr, HAS_MASK: tl.constexpr
):
    """(its begin, end of its run, whether that is FULL), of the first step that `long_steps`
    leaves."""
    if HAS_MASK:
        at = runs + run * 3
        there = run < last_run
        begin = tl.load(at, mask=there, other=0) * BLOCK
        end = tl.minimum(tl.load(at + 1, mask=there, other=0) * BLOCK, length)
        full = tl.load(at + 2, mask=there, other=0) == FULL
    else:
        begin = 0
        end = length
        full = True
    return begin + long_steps(begin, end, full, STEP) * STEP, end, full


@triton.jit
def next_other_step(
    runs, run, last_run, first, end, full, BLOCK: tl.constexpr, length, STEP: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """(its run, its begin, end of its run, whether that is FULL)."""
    first += STEP
    if HAS_MASK:
        # No branch: the addresses of tiles that are loaded ahead depend on this.
        over = first >= end
        run += over.to(tl.int32)
        begin, new_end, new_full = first_other_step(
            runs, run, tl.where(over, last_run, run), BLOCK, length, STEP, HAS_MASK,
        )
        first = tl.where(over, begin, first)
        end = tl.where(over, new_end, end)
        full = tl.where(over, new_full, full)
    return run, first, end, full


@triton.jit
def masked_scores(
    scores, masked, inside, full, b, h, q_idx, kv_idx, tables, ints, floats,
    MASK_MOD: tl.constexpr,
):
    """Scores, -inf at dead pairs.

    Args:
        masked: whether some pair may be dead; None where no step of the loop has one.
        inside: of the rows or columns that the loop runs over, shaped to broadcast; None where all
            are.
        full: whether the mask mod holds for all pairs; None where it is asked.
    """
    if masked is None:
        return scores
    if masked:
        if MASK_MOD is not None:
            live = MASK_MOD(b, h, q_idx, kv_idx, tables, ints, floats)
            if full is None:
                scores = tl.where(live, scores, float("-inf"))
            else:
                # As a second value to choose from, `full` costs less than in the condition.
                scores = tl.where(live, scores, tl.where(full, scores, float("-inf")))
        if inside is not None:
            scores = tl.where(inside, scores, float("-inf"))
    return scores


@triton.jit
def nonfinite(x):
    """Where x, of any float type, is infinite or NaN."""
    return ~(tl.abs(x.to(tl.float32)) < float("inf"))


@triton.jit
def without_nonfinite(x):
    """x with 0 for non-finite elements: at dead pairs weights are 0, and 0 * NaN is NaN."""
    return tl.where(nonfinite(x), tl.zeros_like(x), x)


@triton.jit
def nonfinite_counts(v):
    """Summands over the rows of v, as halves, that tell the kinds of non-finite values in one
    product: infinities count 1 / 256, negative ones 1, NaNs as one of each."""
    tl.static_assert(v.shape[0] < 256)
    counted = tl.where(v == float("inf"), 0.00390625, 0.0)
    counted = tl.where(v == float("-inf"), 1.0, counted)
    return tl.where(v != v, 1.00390625, counted).to(tl.float16)


@triton.jit
def sum_of_counts(count):
    """The sum of non-finite values: 0, an infinity, or NaN, from sums of `nonfinite_counts`."""
    negative = tl.floor(count)
    infinite = tl.where(count > negative, float("inf"), 0.0)
    return infinite + tl.where(negative > 0.0, float("-inf"), 0.0)


@triton.jit
def nonfinite_sum(seen, v):
    """Sums [M, D] over seen keys of non-finite values in v [N, D]: 0, an infinity, or NaN.

    Args:
        seen: [M, N], whether a row sees a key.
    """
    return sum_of_counts(tl.dot(seen.to(tl.float16), nonfinite_counts(v), input_precision="ieee"))
