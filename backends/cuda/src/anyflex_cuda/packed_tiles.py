"""Tiles of packed sequences in Hopper's forward: their places in the list, loads and stores.

No store of a tile touches rows of other sequences, because descriptors cut them off: each has two
dimensions of rows, of the same stride. Rows are `BOX` at a time, the length of the inner one. To
take ``there`` rows from `first` on, a box begins at ``first + there - BOX`` in the outer dimension
and at ``BOX - there`` in the inner one: its other rows are outside of the inner dimension. They
load as 0 and aren't stored. The rows of a pool of pages are numbered through, from page to page.

That number of an outer row would be negative in a sequence that ends within the tensor's first BOX
rows. It is loaded together with rows behind it, which no result depends on, and stored by
pointers. A descriptor that begins BOX rows before the tensor would need neither, but where that
isn't mapped memory an H200 faults at loads of all its boxes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anyflex_cuda.nonfinite_rows import place_of
from anyflex_cuda.packed_tile_list import LIST_HEADER, LISTED_RUNS, RUNS_PLACE, TILE_WORDS
from anyflex_cuda.smem_mailbox import WORDS, said, say
from anyflex_cuda.split_tiles import (
    layout_of_products,
    load_box,
    load_parts,
    reinterpret,
    store_parts,
)
from anyflex_triton.device_functions import FULL, SequenceTile

__all__ = [
    "listed_run",
    "listed_tile",
    "load_bounded",
    "load_sequence_keys",
    "page_numbers",
    "paged_buffers",
    "record_of_item",
    "said_tile",
    "say_tile",
    "store_bounded",
    "store_first_rows",
    "word_of",
]


# Argument lists would be a line an argument.
# fmt: off

@gluon.jit
def record_of_item(item, tiles, schedule):
    """Return (the record of an item, its head). The heads of a group come one after the other,
    because those of a KV head share its keys.

    Args:
        item: number of a tile, counted over all heads; the record is 0 where there is none.
        tiles: number of tiles of a head.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    first_head = item * 0
    if schedule.head_group < schedule.heads:
        first_head = item // gl.maximum(tiles * schedule.head_group, 1) * schedule.head_group
    size = gl.maximum(gl.minimum(schedule.head_group, schedule.heads - first_head), 1)
    at = item - first_head * tiles
    place = schedule.tile_list + LIST_HEADER + at // size * TILE_WORDS
    words = place + gl.arange(0, TILE_WORDS, layout=LAYOUT)
    return gl.load(words, mask=item < tiles * schedule.heads, other=0), first_head + at % size


@gluon.jit
def word_of(record, i):
    """Return word `i` of a record, which lies across the lanes of a warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    return gl.sum(gl.where(gl.arange(0, TILE_WORDS, layout=LAYOUT) == i, record, 0), 0)


@gluon.jit
def listed_tile(record):
    """Return the `SequenceTile` of a record of `packed_tile_list`."""
    end_row = word_of(record, 3)
    return SequenceTile(
        row=word_of(record, 0), owner=word_of(record, 1), first_row=word_of(record, 2),
        end_row=end_row, last_row=end_row - 1, is_padding=None, b=word_of(record, 4),
        shift=word_of(record, 5), kv_begin=word_of(record, 6), kv_length=word_of(record, 7),
    )


@gluon.jit
def listed_run(tile, mask, i, run, kv_length):
    """Return `bounded_run` of a tile's run, from its record if that has it.

    Args:
        tile: `hopper_forward.LoadedTile`. i: number of the run within the tile.
    """
    if tile.lists_steps != 0 and i < LISTED_RUNS:
        begin = word_of(tile.record, RUNS_PLACE + i * 3)
        end = word_of(tile.record, RUNS_PLACE + 1 + i * 3)
        kind = word_of(tile.record, RUNS_PLACE + 2 + i * 3)
    else:
        at = mask.runs + run * 3
        begin = gl.load(at)
        end = gl.load(at + 1)
        kind = gl.load(at + 2)
    end = gl.minimum(end * mask.KV_BLOCK, kv_length)
    return begin * mask.KV_BLOCK, end, kind == FULL


@gluon.jit
def say_tile(words, c, found):
    """Write consumer `c`'s words about a `SequenceTile`."""
    say(words, c * WORDS, found.row)
    say(words, c * WORDS + 1, found.owner)
    say(words, c * WORDS + 2, found.end_row)
    say(words, c * WORDS + 3, found.b)
    say(words, c * WORDS + 4, found.shift)
    say(words, c * WORDS + 5, found.kv_begin)
    say(words, c * WORDS + 6, found.kv_length)


@gluon.jit
def said_tile(words, c, first_row):
    """Return consumer `c`'s `SequenceTile`, whose rows begin at `first_row`."""
    end_row = said(words, c * WORDS + 2)
    return SequenceTile(
        row=said(words, c * WORDS), owner=said(words, c * WORDS + 1), first_row=first_row,
        end_row=end_row, last_row=end_row - 1, is_padding=None, b=said(words, c * WORDS + 3),
        shift=said(words, c * WORDS + 4), kv_begin=said(words, c * WORDS + 5),
        kv_length=said(words, c * WORDS + 6),
    )


@gluon.jit
def rows_there(first, end, ROWS: gl.constexpr):
    """Return how many of ROWS rows from `first` on are before `end`."""
    return gl.maximum(gl.minimum(end - first, ROWS), 0)


@gluon.jit
def load_bounded(descs, bufs, slot, full, h, first, end):
    """Load rows from `first` on, and 0 from `end` on, into a slot of each part's buffers; behind
    an `end` that is within the tensor's first rows, any rows of it."""
    ROWS: gl.constexpr = bufs[0].shape[3]
    outer = gl.maximum(first + rows_there(first, end, ROWS) - ROWS, 0)
    load_parts(descs, bufs, slot, full, h, outer, first - outer)


@gluon.jit
def store_bounded(descs, bufs, ME: gl.constexpr, h, first, end):
    """Store rows from `first` on and before `end`, asynchronously. `end` isn't within the tensor's
    first rows: see `store_first_rows`."""
    ROWS: gl.constexpr = bufs[0].shape[3]
    there = rows_there(first, end, ROWS)
    store_parts(descs, bufs, ME, h, first + there - ROWS, ROWS - there)


@gluon.jit
def store_first_rows(acc, tensors, h, first, end):
    """Store rows of `PointedTensors.out` from `first` on and before `end`, by pointers."""
    for p in gl.static_range(len(acc)):
        LAYOUT: gl.constexpr = layout_of_products(acc[p].shape[1])
        ROWS: gl.constexpr = acc[p].shape[0]
        rows = gl.expand_dims(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), 1)
        columns = gl.arange(0, acc[p].shape[1], layout=gl.SliceLayout(0, LAYOUT))
        columns = gl.expand_dims(p * acc[0].shape[1] + columns, 0)
        at = place_of(tensors.o_strides, 0, h) + rows * tensors.o_strides[2] + columns
        there = (rows < end) & (columns < tensors.VALUE_DIM)
        gl.store(tensors.out + at, acc[p].to(tensors.out.dtype.element_ty), mask=there)


@gluon.jit
def page_numbers(pages, first, end, descs, ROWS: gl.constexpr):
    """Return the numbers of the pages of each box of a step's ROWS keys: a tuple. What the table
    has beyond `end` isn't followed, and all are inside of the pool."""
    BOX: gl.constexpr = descs[0].block_shape[2]
    numbers = descs[:0]
    for i in gl.static_range(ROWS // BOX):
        key = first + i * BOX
        number = gl.load(pages.table + key // pages.SIZE, mask=key < end, other=0)
        numbers = numbers + (gl.maximum(gl.minimum(number, pages.last), 0),)
    return numbers


@gluon.jit
def load_part_of_pages(
    desc, buf, slot, full, kv_head, numbers, first, end, page_rows,
    first_column: gl.constexpr, PAGE: gl.constexpr,
):
    """Load one part's columns for `load_pages`."""
    BOX: gl.constexpr = desc.block_shape[2]
    WIDTH: gl.constexpr = desc.block_shape[3]
    BOXES: gl.constexpr = buf.shape[3] // BOX
    BESIDE: gl.constexpr = buf.shape[4] // WIDTH
    SHAPE: gl.constexpr = [buf.shape[0] * BESIDE * BOXES, 1, 1, BOX, WIDTH]
    DTYPE: gl.constexpr = desc.dtype
    LAYOUT: gl.constexpr = desc.layout
    pieces = reinterpret(buf, DTYPE, SHAPE, LAYOUT)
    for i in gl.static_range(BOXES):
        key = first + i * BOX
        there = rows_there(key, end, BOX)
        row = numbers[i] * page_rows + key % PAGE
        outer = gl.maximum(row + there - BOX, 0)
        inner = row - outer
        if i > 0:
            inner = gl.where(there > 0, inner, BOX)
        for c in gl.static_range(BESIDE):
            at = [kv_head, outer, inner, first_column + c * WIDTH]
            load_box(desc, at, full, pieces.index((slot * BESIDE + c) * BOXES + i))


@gluon.jit
def load_pages(
    descs, bufs, slot, full, kv_head, numbers, first, end, page_rows, PAGE: gl.constexpr
):
    """Load keys from `first` on, and 0 from `end` on, into a slot of each part's buffers, which
    hold 64 columns of all rows after the other.

    Args:
        numbers: from `page_numbers`.
        page_rows: number of rows from a page to the next.
    """
    for p in gl.static_range(len(bufs)):
        load_part_of_pages(
            descs[p], bufs[p], slot, full, kv_head, numbers, first, end, page_rows,
            p * bufs[0].shape[4], PAGE,
        )


@gluon.jit
def load_sequence_keys(descs, bufs, slot, full, tile, numbers, first, end, page_rows):
    """Load a step's keys, or values, of a tile's sequence into a slot of each part's buffers.

    Args:
        tile: `hopper_forward.LoadedTile`.
        numbers: from `page_numbers`; None for packed keys, as `page_rows` of `load_pages`.
    """
    if tile.pages is None:
        begin = tile.kv_begin
        load_bounded(descs, bufs, slot, full, tile.kv_head, begin + first, begin + end)
    else:
        load_pages(
            descs, bufs, slot, full, tile.kv_head, numbers, first, end, page_rows,
            tile.pages.SIZE,
        )


@gluon.jit
def paged_buffer(desc, ROOMS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Allocate shared memory for ROOMS times ROWS rows that are loaded in several boxes."""
    SHAPE: gl.constexpr = [1, 1, ROWS, COLUMNS]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, desc.dtype)
    return gl.allocate_shared_memory(desc.dtype, [ROOMS] + SHAPE, LAYOUT)


@gluon.jit
def paged_buffers(descs, ROOMS: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    """Call `paged_buffer` for each part; a second one is as wide as its box.

    Args:
        D: number of columns of all parts.
    """
    if len(descs) == 1:
        return (paged_buffer(descs[0], ROOMS, ROWS, D),)
    else:
        SECOND: gl.constexpr = descs[1].block_shape[3]
        return (
            paged_buffer(descs[0], ROOMS, ROWS, D - SECOND),
            paged_buffer(descs[1], ROOMS, ROWS, SECOND),
        )
