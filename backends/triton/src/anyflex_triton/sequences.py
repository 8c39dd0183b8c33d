"""Device functions for packed sequences: a program's sequence, and rows of keys in pages."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from anyflex_triton.kernel_records import HeadRows, Pages, Scales
from anyflex_triton.records import record
from anyflex_triton.tiles import store_rows, tensor_at

__all__ = [
    "LEAST_SPLIT",
    "SequenceTile",
    "first_of_split",
    "has_rows",
    "keys_of_sequence",
    "line_of_sequence",
    "pages_of_line",
    "pages_of_sequence",
    "sequence_of_tile",
    "store_padding",
]

LEAST_SPLIT = tl.constexpr(512)
"""Number of keys of the first splits of a batch-invariant call. Steps of the keys divide it."""

# Argument lists would be a line an argument.
# fmt: off


@record
class SequenceTile:
    """A query tile of one sequence.

    Attributes:
        row: row of blocks. owner: number of the sequence.
        first_row, end_row: of query. last_row: of the sequence.
        is_padding: they are padding rows.
        b, shift: what mods see as b; what is added to rows for q_idx.
        kv_begin, kv_length: first row in packed keys; number of keys, none outside of the tensors.
    """

    row: Any
    owner: Any
    first_row: Any
    end_row: Any
    last_row: Any
    is_padding: Any
    b: Any
    shift: Any
    kv_begin: Any
    kv_length: Any


@triton.jit
def sequence_of_tile(
    sequences, tile, q_length, Q_BLOCK: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return the `SequenceTile` of a tile, without rows where there is none."""
    blocks, q_offsets, q_starts, kv_lengths, slots, kv_offsets = (
        sequences[0], sequences[1], sequences[2], sequences[3], sequences[4], sequences[5],
    )
    count, tiles_a_block, most_keys, key_rows = (
        sequences[8], sequences[9], sequences[10], sequences[11],
    )
    row = tile // tiles_a_block
    sequence = tl.load(blocks + row * 2)
    is_padding = sequence == count
    owner = tl.maximum(tl.minimum(sequence, count - 1), 0)
    # Numbers on a device may break their bounds: none leads outside of a tensor.
    begin = tl.load(q_offsets + tl.maximum(sequence, 0))
    end = tl.load(q_offsets + owner + 1)
    begin = tl.maximum(tl.minimum(begin, q_length), 0)
    end = tl.where(is_padding, q_length, tl.maximum(tl.minimum(end, q_length), 0))
    block_begin = begin + tl.maximum(tl.load(blocks + row * 2 + 1), 0) * Q_BLOCK
    first_row = block_begin + tile % tiles_a_block * BLOCK_M
    end_row = tl.where(sequence < 0, 0, tl.minimum(block_begin + Q_BLOCK, end))
    kv_length = tl.minimum(tl.load(kv_lengths + owner), most_keys)
    if PAGE == 0:
        kv_begin = tl.maximum(tl.minimum(tl.load(kv_offsets + owner), key_rows), 0)
        kv_length = tl.minimum(kv_length, key_rows - kv_begin)
    else:
        kv_begin = 0
    return SequenceTile(
        row=row, owner=owner, first_row=first_row, end_row=end_row, last_row=end - 1,
        is_padding=is_padding, b=tl.load(slots + owner), shift=tl.load(q_starts + owner) - begin,
        kv_begin=kv_begin, kv_length=tl.where(is_padding, 0, tl.maximum(kv_length, 0)),
    )


@triton.jit
def line_of_sequence(sequences, owner):
    """Return the line of the page table of a sequence, or of several, given their numbers."""
    table_rows, height, named = sequences[7], sequences[13], sequences[14]
    line = tl.where(named != 0, tl.load(table_rows + owner), owner)
    return tl.maximum(tl.minimum(line, height - 1), 0)


@triton.jit
def pages_of_line(sequences, line, PAGE: tl.constexpr):
    """Return the `Pages` of a line of the page table."""
    table, pool, stride = sequences[6], sequences[11], sequences[12]
    return Pages(table=table + line * stride, last=pool - 1, SIZE=PAGE)


@triton.jit
def has_rows(sequences, owner, most):
    """Return whether a sequence, given its number, has at most `most` query rows."""
    return tl.load(sequences[1] + owner + 1) - tl.load(sequences[1] + owner) <= most


@triton.jit
def first_of_split(split):
    """Return the first key of a split of a batch-invariant call, given the split's number, which
    decides it alone: 16 splits of LEAST_SPLIT keys, then 8 of twice as many, 8 of four times as
    many, and so on."""
    doubled = tl.maximum(split // 8 - 1, 0)
    return tl.where(split < 8, split, (8 + split % 8) << doubled) * LEAST_SPLIT


@triton.jit
def pages_of_sequence(sequences, owner, PAGE: tl.constexpr):
    """Return the `Pages` of a sequence, given its number."""
    return pages_of_line(sequences, line_of_sequence(sequences, owner), PAGE)


@triton.jit
def keys_of_sequence(rows, sequences, found, scales, kv_head, PAGE: tl.constexpr):
    """Return `HeadRows` of a sequence's own keys or values.

    Args:
        rows: `HeadRows` of batch entry 0 and head `kv_head`, by pointers.
        found: `SequenceTile`.
        scales: (pointer, strides of page, head and row), or None.
    """
    if PAGE == 0:
        base = rows.base + found.kv_begin.to(tl.int64) * rows.strides[2] * rows.UNIT
        pages = None
    else:
        base = rows.base
        pages = pages_of_sequence(sequences, found.owner, PAGE)
    of_rows = None
    if scales is not None:
        first = scales[0] + kv_head.to(tl.int64) * scales[2] + found.kv_begin * scales[3]
        of_rows = Scales(base=first, page=scales[1], row=scales[3])
    return HeadRows(
        tensor=None, base=base, strides=rows.strides, DIM=rows.DIM, D=rows.D, UNIT=rows.UNIT,
        SCATTERED=rows.SCATTERED, WIDE=rows.WIDE, DESCRIBED=None, PRECISION=rows.PRECISION,
        pages=pages, scales=of_rows,
    )


@triton.jit
def store_padding(
    out, lse, max_scores, o_strides, h, q_length, found, VALUE_DIM: tl.constexpr,
    DV: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, WANT_LSE: tl.constexpr,
    WANT_MAX: tl.constexpr, Q_BLOCK: tl.constexpr,
):
    """Store the results of a block of padding rows."""
    rows = tl.arange(0, Q_BLOCK)
    there = found.end_row - found.first_row
    base = tensor_at(out, o_strides, 0 * h, h, UNIT)
    base += found.first_row.to(tl.int64) * o_strides[2] * UNIT
    for column in tl.static_range(0, VALUE_DIM, DV):
        zeros = tl.zeros([Q_BLOCK, DV], tl.float32)
        store_rows(base, o_strides, rows, there, zeros, VALUE_DIM, DV, UNIT, WIDE, column)
    at = h.to(tl.int64) * q_length + found.first_row + rows
    none = tl.full([Q_BLOCK], float("-inf"), tl.float32)
    if WANT_LSE:
        tl.store(lse + at, none, mask=rows < there)
    if WANT_MAX:
        tl.store(max_scores + at, none, mask=rows < there)
