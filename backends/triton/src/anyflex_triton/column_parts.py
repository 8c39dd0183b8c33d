"""Tiles of rows whose columns come in parts, for head dims that padding would enlarge by much.

The columns of a block of Triton's are a power of two: head dim 192 would be padded to 256, and is
three blocks of 64 instead (`kernel_signatures.columns_of_part`). A tile is the tuple of its parts,
each [rows, D]; most have one.
"""

# A tuple grows by a part in each turn of an unrolled loop.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from anyflex_triton.tiles import (
    in_type,
    load_paged_rows,
    load_rows,
    load_tile,
    nonfinite,
    scaled_tile,
    store_rows,
    without_nonfinite,
)

__all__ = [
    "add_products",
    "any_nonfinite",
    "chosen_rows",
    "finite_parts",
    "load_pointed_rows",
    "load_step_rows",
    "product_of_rows",
    "rows_times",
    "scaled_rows",
    "store_parts",
    "zeros_of_parts",
]

# Argument lists would be a line an argument.
# fmt: off


@triton.jit
def load_step_rows(rows, first, places, end, BOUND: tl.constexpr):
    """Load the parts of the rows first + places of `kernel_records.HeadRows`, as `load_tile`."""
    parts = ()
    for column in tl.static_range(0, rows.DIM, rows.D):
        parts = parts + (load_tile(rows, first, places, end, BOUND, column),)
    return parts


@triton.jit
def load_pointed_rows(rows, places, end):
    """Load the parts of the rows `places` of `kernel_records.HeadRows` by pointers; 0 past
    `end`."""
    parts = ()
    for column in tl.static_range(0, rows.DIM, rows.D):
        if rows.pages is not None:
            columns = column + tl.arange(0, rows.D)
            parts = parts + (load_paged_rows(rows, 0, places, end, columns, True),)
        else:
            parts = parts + (load_rows(
                rows.base, rows.strides, places, end, rows.DIM, rows.D, rows.UNIT, rows.SCATTERED,
                rows.WIDE, True, column,
            ),)
    return parts


@triton.jit
def zeros_of_parts(ROWS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr):
    """Return zeros for sums of products, float32."""
    parts = ()
    for _column in tl.static_range(0, DIM, D):
        parts = parts + (tl.zeros([ROWS, D], tl.float32),)
    return parts


@triton.jit
def product_of_rows(a, b, PRECISION: tl.constexpr):
    """Return a b^T [rows of a, rows of b], in a's type."""
    product = tl.dot(a[0], tl.trans(in_type(b[0], a[0].dtype)), input_precision=PRECISION)
    for i in tl.static_range(1, len(a)):
        of_part = tl.trans(in_type(b[i], a[i].dtype))
        product = tl.dot(a[i], of_part, product, input_precision=PRECISION)
    return product


@triton.jit
def rows_times(parts, scales, dtype: tl.constexpr):
    """Apply `tiles.scaled_tile` to each part."""
    found = ()
    for i in tl.static_range(len(parts)):
        found = found + (scaled_tile(parts[i], scales, dtype),)
    return found


@triton.jit
def add_products(sums, x, rows, PRECISION: tl.constexpr):
    """Return sums + x rows, for x [M, N] and `rows` of N rows."""
    parts = ()
    for i in tl.static_range(len(sums)):
        parts = parts + (tl.dot(x, rows[i], sums[i], input_precision=PRECISION),)
    return parts


@triton.jit
def scaled_rows(sums, factors):
    """Return `sums` times one factor per row, [M]."""
    parts = ()
    for i in tl.static_range(len(sums)):
        parts = parts + (sums[i] * factors[:, None],)
    return parts


@triton.jit
def any_nonfinite(parts):
    """Return int32, 1 for each row with a non-finite element."""
    found = tl.max(nonfinite(parts[0]).to(tl.int32), 1)
    for i in tl.static_range(1, len(parts)):
        found = tl.maximum(found, tl.max(nonfinite(parts[i]).to(tl.int32), 1))
    return found


@triton.jit
def finite_parts(parts):
    """Apply `without_nonfinite` to each part."""
    found = ()
    for i in tl.static_range(len(parts)):
        found = found + (without_nonfinite(parts[i]),)
    return found


@triton.jit
def chosen_rows(chosen, parts):
    """Return `parts` with 0 in rows that aren't chosen."""
    found = ()
    for i in tl.static_range(len(parts)):
        found = found + (tl.where(chosen[:, None], parts[i], tl.zeros_like(parts[i])),)
    return found


@triton.jit
def store_parts(rows, places, end, parts, factor):
    """Store parts at the rows `places` of `kernel_records.HeadRows` before `end`, as `store_rows`,
    times `factor` unless that is None."""
    for i in tl.static_range(len(parts)):
        value = parts[i]
        if factor is not None:
            value = value * factor
        store_rows(
            rows.base, rows.strides, places, end, value, rows.DIM, rows.D, rows.UNIT, rows.WIDE,
            i * rows.D,
        )
