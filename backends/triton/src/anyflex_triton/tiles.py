"""Device functions that the kernels share: loads of rows, the block mask's rows, non-finite
values.

The kernels are written for any Triton target: pointers with masks, no inline assembly, and atomics
only for gradients of captured tensors. A tile of scores is [M, N]: M query rows, N keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyflex_triton.kernel_records import HeadRows

__all__ = [
    "FAR",
    "FEW",
    "FULL",
    "LOG2E",
    "PARTIAL",
    "bounded_run",
    "first_other_step",
    "head_at",
    "in_type",
    "indices",
    "is_far",
    "load_key_scales",
    "load_paged_rows",
    "load_part",
    "load_rows",
    "load_scales",
    "load_tile",
    "long_steps",
    "mask_row",
    "masked_scores",
    "natural_scores",
    "next_other_step",
    "nonfinite",
    "nonfinite_counts",
    "nonfinite_sum",
    "place_of_tile",
    "row_offsets",
    "rows_by_pointers",
    "rows_of_steps",
    "scaled_tile",
    "store_part",
    "store_row",
    "store_rows",
    "sum_of_counts",
    "tensor_at",
    "with_sink",
    "without_nonfinite",
]

# Argument lists would be a line an argument.
# fmt: off

LOG2E = tl.constexpr(1.4426950408889634)
FULL = tl.constexpr(1)
"""Kind of a run, as `anyflex.plugin.FULL`."""
PARTIAL = tl.constexpr(2)
"""Kind of a run, as `anyflex.plugin.PARTIAL`."""
FAR = tl.constexpr(1048576.0)
"""Size of scores, in powers of two, from which a row is far. Weights are 2^(score * unit - base),
where a row's base is its row_max times unit, rounded: all weights of a row are off by one factor,
which the softmax divides out. From here on that factor may be far from 1; from 2^30 no float holds
it, and the product overflows for scores like the lowest float, of which masks are made."""
FEW = tl.constexpr(16)
"""Number of rows or keys of a step that recomputes non-finite values or far rows: the minimum of
products. Such steps hardly ever run, so that their compile time counts and not their speed."""
LONG = tl.constexpr(4)
"""Minimum number of steps of a loop without a mask's code: each loop begins with a wait, but its
steps are shorter."""


@triton.jit
def tensor_at(pointer, strides, b, h, UNIT: tl.constexpr):
    """Return a pointer to the first row of (b, h) of a tensor whose strides count UNIT
    elements."""
    return pointer + (b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]) * UNIT


@triton.jit
def head_at(
    tensor, strides, b, h, heads, length, UNIT: tl.constexpr, DESCRIBED: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """Return where the rows of (b, h) begin: a pointer or, where DESCRIBED is "host" and one
    descriptor covers all heads, (row, column) in it.

    Args:
        BESIDE: heads lie side by side in the descriptor's rows; otherwise one after the other.
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
    """Return the offsets [rows, columns] of elements within one (b, h)."""
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    columns = columns.to(INDEX)
    if SCATTERED:
        columns = columns * strides[3].to(INDEX)
    return rows.to(INDEX)[:, None] * (strides[2].to(INDEX) * UNIT) + columns[None, :]


@triton.jit
def indices(first, places, length, shift, BOUND: tl.constexpr, SCORED: tl.constexpr):
    """Return the indices of the rows or keys first + places as mods see them.

    Args:
        BOUND: some may be past the end; they read the last one's elements.
        SCORED: a score mod takes them, in steps without a mask too.
    """
    if BOUND:
        return tl.minimum(first + places, length - 1) + shift
    elif SCORED:
        # The minimum changes nothing. Without it both numbers are added to each place one by one,
        # and the part that loops share is kept in registers. A mask alone takes fewer registers
        # without it.
        return places + tl.minimum(first + shift, 0x7FFFFFFE)
    else:
        return first + places + shift


@triton.jit
def is_far(top, base):
    """Return which rows' weights must be computed from score - top, which is exact.

    Args:
        top: row_max; non-finite in rows without a finite score.
        base: top in powers of two.
    """
    return (tl.abs(base) >= FAR) & (tl.abs(top) < float("inf"))


@triton.jit
def load_rows(
    base, strides, rows, end, DIM: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr,
    SCATTERED: tl.constexpr, WIDE: tl.constexpr, BOUND: tl.constexpr, FIRST: tl.constexpr = 0,
):
    """Load rows of one (b, h), D columns from FIRST on; 0 past `end` where BOUND, and in columns
    from DIM on."""
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
def rows_by_pointers(
    tensor, strides, b, h, layouts, PLACE: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr
):
    """Return `HeadRows` of (b, h), to be loaded by pointers.

    Args:
        layouts: `RowLayouts`. PLACE: index of the tensor among them.
    """
    return HeadRows(
        tensor=None, base=tensor_at(tensor, strides, b, h, layouts.UNITS[PLACE]), strides=strides,
        DIM=DIM, D=D, UNIT=layouts.UNITS[PLACE], SCATTERED=layouts.SCATTERED[PLACE],
        WIDE=layouts.WIDE, DESCRIBED=None, PRECISION=layouts.PRECISION,
    )


@triton.jit
def rows_of_steps(
    tensor, strides, b, h, heads, length, layouts, PLACE: tl.constexpr, DIM: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, DESCRIBED: tl.constexpr, BESIDE: tl.constexpr,
):
    """Return `HeadRows` of (b, h), to be loaded ROWS at a time as DESCRIBED says.

    Args:
        heads, length: those of the tensor.
        layouts, PLACE: as in `rows_by_pointers`. BESIDE: as in `head_at`.
    """
    UNIT: tl.constexpr = layouts.UNITS[PLACE]
    base = head_at(tensor, strides, b, h, heads, length, UNIT, DESCRIBED, BESIDE)
    if DESCRIBED == "kernel":
        rows = tl.make_tensor_descriptor(base, [length, DIM], [strides[2] * UNIT, 1], [ROWS, D])
    else:
        rows = tensor
    return HeadRows(
        tensor=rows, base=base, strides=strides, DIM=DIM, D=D, UNIT=UNIT,
        SCATTERED=layouts.SCATTERED[PLACE], WIDE=layouts.WIDE, DESCRIBED=DESCRIBED,
        PRECISION=layouts.PRECISION,
    )


@triton.jit
def load_part(rows, places, end, columns):
    """Load some columns of the rows `places` of `HeadRows` by pointers; 0 past `end`, and in
    columns from DIM on."""
    if rows.pages is not None:
        return load_paged_rows(rows, 0, places, end, columns, True)
    offsets = row_offsets(places, columns, rows.strides, rows.UNIT, rows.SCATTERED, rows.WIDE)
    inside = (places < end)[:, None] & (columns < rows.DIM)[None, :]
    return tl.load(rows.base + offsets, mask=inside, other=0.0)


@triton.jit
def pages_at(rows, numbers, end, BOUND: tl.constexpr):
    """Return the pages that are in these places of the table of `HeadRows`. Entries of pages past
    `end` aren't followed where BOUND; others are cut to the pool."""
    at = rows.pages.table + numbers
    if BOUND:
        page = tl.load(at, mask=numbers * rows.pages.SIZE < end, other=0)
    else:
        page = tl.load(at)
    return tl.minimum(tl.maximum(page, 0), rows.pages.last).to(tl.int64)


@triton.jit
def in_pages(first, places, SIZE: tl.constexpr):
    """Return (numbers of their pages in the table, rows in these) of first + places. Steps begin
    at multiples of their length."""
    STEP: tl.constexpr = places.shape[0]
    # Triton's shapes aren't divisors of a number.
    if STEP // SIZE * SIZE == STEP:
        # Each step has the same rows in pages.
        return first // SIZE + places // SIZE, places % SIZE
    else:
        return (first + places) // SIZE, (first + places) % SIZE


@triton.jit
def load_paged_rows(rows, first, places, end, columns, BOUND: tl.constexpr):
    """Load some columns of the rows first + places, which lie in pages, of `HeadRows`: 0 past
    `end` where BOUND, and in columns from DIM on."""
    numbers, within = in_pages(first, places, rows.pages.SIZE)
    begins = rows.base + within.to(tl.int64) * rows.strides[2] * rows.UNIT
    begins += pages_at(rows, numbers, end, BOUND) * rows.strides[0] * rows.UNIT
    if rows.SCATTERED:
        offsets = columns.to(tl.int64) * rows.strides[3]
    else:
        offsets = columns
    inside = (columns < rows.DIM)[None, :]
    if BOUND:
        inside = inside & (first + places < end)[:, None]
    return tl.load(begins[:, None] + offsets[None, :], mask=inside, other=0.0)


@triton.jit
def load_paged_tile(rows, first, places, end, BOUND: tl.constexpr, FIRST: tl.constexpr):
    """`load_tile` of rows in pages."""
    SIZE: tl.constexpr = rows.pages.SIZE
    # Such a step lies in one page.
    if SIZE // places.shape[0] * places.shape[0] == SIZE:
        base = rows.base + pages_at(rows, first // SIZE, end, BOUND) * rows.strides[0] * rows.UNIT
        base += first % SIZE * rows.strides[2] * rows.UNIT
        return load_rows(
            base, rows.strides, places, end - first, rows.DIM, rows.D, rows.UNIT, rows.SCATTERED,
            rows.WIDE, BOUND, FIRST,
        )
    else:
        columns = FIRST + tl.arange(0, rows.D)
        return load_paged_rows(rows, first, places, end, columns, BOUND)


@triton.jit
def load_scales(rows, first, places, end, BOUND: tl.constexpr):
    """Load the scales of the rows first + places of `HeadRows`, float32: 0 past `end` where
    BOUND."""
    pointer = rows.scales.base
    if rows.pages is None:
        pointer += (first + places).to(tl.int64) * rows.scales.row
    else:
        SIZE: tl.constexpr = rows.pages.SIZE
        if SIZE // places.shape[0] * places.shape[0] == SIZE:
            pointer += pages_at(rows, first // SIZE, end, BOUND) * rows.scales.page
            pointer += first % SIZE * rows.scales.row
            pointer += places.to(tl.int64) * rows.scales.row
        else:
            numbers, within = in_pages(first, places, SIZE)
            pointer += within.to(tl.int64) * rows.scales.row
            pointer += pages_at(rows, numbers, end, BOUND) * rows.scales.page
    if BOUND:
        return tl.load(pointer, mask=first + places < end, other=0.0)
    return tl.load(pointer)


@triton.jit
def load_key_scales(rows, first, places, end, BOUND: tl.constexpr):
    """Apply `load_scales` to keys. A scale that isn't finite is NaN: infinite, it would make a
    pair dead whose product is negative."""
    scales = load_scales(rows, first, places, end, BOUND)
    return tl.where(nonfinite(scales), float("nan"), scales)


@triton.jit
def in_type(tile, dtype: tl.constexpr):
    """Return numbers in `dtype`, which holds those stored in 8 bits exactly. From float8 to
    bfloat16 a GPU takes a quarter of the time by float32."""
    if tile.dtype == dtype:
        return tile
    else:
        return tile.to(tl.float32).to(dtype)


@triton.jit
def scaled_tile(tile, scales, dtype: tl.constexpr):
    """Return stored rows [N, D] times their scales [N] in `dtype`, rounded once."""
    return (tile.to(tl.float32) * scales[:, None]).to(dtype)


@triton.jit
def load_tile(rows, first, places, end, BOUND: tl.constexpr, FIRST: tl.constexpr = 0):
    """Load the rows first + places of `HeadRows`, D columns from FIRST on.

    Where DESCRIBED, past `end` the tile has rows of the next head, batch entry or block, or 0: all
    their pairs are dead.

    Args:
        BOUND: some rows may be past `end`.
    """
    if rows.DESCRIBED is not None:
        if rows.DESCRIBED == "host":
            return rows.tensor.load([rows.base[0] + first, rows.base[1] + FIRST])
        else:
            return rows.tensor.load([first, FIRST])
    elif rows.pages is not None:
        return load_paged_tile(rows, first, places, end, BOUND, FIRST)
    else:
        return load_rows(
            rows.base, rows.strides, first + places, end, rows.DIM, rows.D, rows.UNIT,
            rows.SCATTERED, rows.WIDE, BOUND, FIRST,
        )


@triton.jit
def store_rows(
    base, strides, rows, end, value, DIM: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr, FIRST: tl.constexpr = 0,
):
    """Store rows before `end`, columns from FIRST on and before DIM; the last stride is 1."""
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
    """Store some columns of rows, as `store_rows`."""
    offsets = row_offsets(rows, columns, strides, UNIT, False, WIDE)
    inside = (rows < end)[:, None] & (columns < DIM)[None, :]
    tl.store(base + offsets, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def natural_scores(scores, scale, SCORED: tl.constexpr):
    """Return `forward.final_scores` in the user's unit; SCORED: there is a score mod."""
    if SCORED:
        return scores
    else:
        return scores * scale


@triton.jit
def with_sink(row_sum, row_max, base, sink):
    """Return rows' sums of weights with the sink's, relative to `base`, which is in powers of two;
    rows without a live key keep theirs."""
    weight = tl.exp2(sink * LOG2E - base)
    return row_sum + tl.where(row_max == float("-inf"), 0.0, weight)


@triton.jit
def store_row(
    acc, row_max, row_sum, nan, at, out, rest, o_strides, scale, results, heads, q_length,
    VALUE_DIM: tl.constexpr, DV: tl.constexpr, UNIT: tl.constexpr, WANT_REST: tl.constexpr,
):
    """Store the wanted results of one query row.

    Args:
        acc: [DV], weighted values; row_max, row_sum: as `decode.decode_kernel` stores them; nan: 1
            if a score is NaN.
        at: index of the row over all rows of all heads.
        results: `RowResults`.
    """
    dims = tl.arange(0, DV)
    row = at % q_length
    bh = at // q_length
    dead = (row_max == float("-inf")) & (row_sum == row_sum)
    highest = natural_scores(row_max, scale, results.SCORED)
    whole = row_sum
    if results.sinks is not None:
        sink = tl.load(results.sinks + bh % heads)
        whole = with_sink(row_sum, row_max, highest * LOG2E, sink)
    acc = tl.where(dead, 0.0, acc / tl.where(dead, 1.0, whole))
    base = tensor_at(out, o_strides, bh // heads, bh % heads, UNIT) + row * o_strides[2] * UNIT
    tl.store(base + dims, acc.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
    if WANT_REST:
        # Rounding is as in forward; rows of rest lie one after the other.
        rounding = acc - acc.to(out.dtype.element_ty).to(tl.float32)
        rest_at = rest + at * VALUE_DIM + dims
        tl.store(rest_at, rounding.to(rest.dtype.element_ty), mask=dims < VALUE_DIM)
    if results.WANT_LSE:
        natural = highest + tl.log2(row_sum) / LOG2E
        tl.store(results.lse + at, tl.where(dead, float("-inf"), natural))
    if results.WANT_MAX:
        tl.store(results.max_scores + at, tl.where(nan > 0, float("nan"), highest))
    if results.WANT_TOPS:
        tl.store(results.tops + at * 2, row_max)
        tl.store(results.tops + at * 2 + 1, tl.log2(whole))


@triton.jit
def place_of_tile(
    tile, length, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_MASK: tl.constexpr
):
    """Return (block of the mask, first row, end of the rows) of a tile of ROWS rows or keys. No
    tile crosses a BLOCK of the mask.

    Args:
        length: number of all rows or keys.
    """
    if HAS_MASK:
        TILES_A_BLOCK: tl.constexpr = (BLOCK + ROWS - 1) // ROWS
        block = tile // TILES_A_BLOCK
        first = block * BLOCK + (tile % TILES_A_BLOCK) * ROWS
        return block, first, tl.minimum((block + 1) * BLOCK, length)
    else:
        return 0, tile * ROWS, length


@triton.jit
def mask_row(offsets, ends, mask_strides, b, h, row, HAS_MASK: tl.constexpr = True):
    """Return where the runs of a row of blocks begin and end; without a mask, those of one run."""
    if HAS_MASK:
        at = b * mask_strides[0] + h * mask_strides[1] + row
        return tl.load(offsets + at), tl.load(ends + at)
    else:
        return 0, 1


@triton.jit
def bounded_run(runs, run, BLOCK: tl.constexpr, length, HAS_MASK: tl.constexpr):
    """Return a run in elements, cut at `length`, and whether it is FULL; without a mask, one run
    of all."""
    if HAS_MASK:
        at = runs + run * 3
        end = tl.minimum(tl.load(at + 1) * BLOCK, length)
        return tl.load(at) * BLOCK, end, tl.load(at + 2) == FULL
    else:
        return 0, length, True


@triton.jit
def long_steps(begin, end, full, STEP: tl.constexpr):
    """Return the number of steps of a FULL run that are worth a loop of their own, without any
    mask's code: all but the last, so that every run leaves one. 0 for the other runs."""
    steps = (end - begin - 1) // STEP
    return tl.where(full & (steps >= LONG), steps, 0)


@triton.jit
def first_other_step(
    runs, run, last_run, BLOCK: tl.constexpr, length, STEP: tl.constexpr, HAS_MASK: tl.constexpr
):
    """Return (begin, end of its run, whether that is FULL) of the first step that `long_steps`
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
    """Return (run, begin, end of the run, whether that is FULL) of the next such step."""
    first += STEP
    if HAS_MASK:
        # Computed without a branch, because the addresses of tiles that are loaded ahead depend on
        # it.
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
    """Return the scores, -inf at dead pairs.

    Args:
        masked: whether some pair may be dead; None where no step of the loop has a dead pair.
        inside: whether each row or column that the loop steps over exists, shaped to broadcast;
            None where all do.
        full: whether the mask mod holds for all pairs; None where it must be evaluated.
    """
    if masked is None:
        return scores
    if masked:
        if MASK_MOD is not None:
            live = MASK_MOD(b, h, q_idx, kv_idx, tables, ints, floats)
            if full is None:
                scores = tl.where(live, scores, float("-inf"))
            else:
                # Selecting by `full` separately costs less than including it in the condition.
                scores = tl.where(live, scores, tl.where(full, scores, float("-inf")))
        if inside is not None:
            scores = tl.where(inside, scores, float("-inf"))
    return scores


@triton.jit
def nonfinite(x):
    """Return where x, of any float type, is infinite or NaN."""
    return ~(tl.abs(x.to(tl.float32)) < float("inf"))


@triton.jit
def without_nonfinite(x):
    """Return x with 0 for non-finite elements: weights are 0 at dead pairs, and 0 * NaN is NaN."""
    return tl.where(nonfinite(x), tl.zeros_like(x), x)


@triton.jit
def nonfinite_counts(v):
    """Return summands of v's shape, as halves, whose sum over rows, one product, counts non-finite
    values by kind: an infinity counts 1 / 256, a negative one 1, NaN as one of each."""
    tl.static_assert(v.shape[0] < 256)
    counted = tl.where(v == float("inf"), 0.00390625, 0.0)
    counted = tl.where(v == float("-inf"), 1.0, counted)
    return tl.where(v != v, 1.00390625, counted).to(tl.float16)


@triton.jit
def sum_of_counts(count):
    """Return the sum of non-finite values: 0, an infinity, or NaN, from sums of
    `nonfinite_counts`."""
    negative = tl.floor(count)
    infinite = tl.where(count > negative, float("inf"), 0.0)
    return infinite + tl.where(negative > 0.0, float("-inf"), 0.0)


@triton.jit
def nonfinite_sum(seen, v):
    """Return sums [M, D] over seen keys of non-finite values in v [N, D]: 0, an infinity, or NaN.

    Args:
        seen: [M, N], whether a row sees a key.
    """
    return sum_of_counts(tl.dot(seen.to(tl.float16), nonfinite_counts(v), input_precision="ieee"))
