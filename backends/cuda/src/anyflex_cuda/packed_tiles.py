"""Tiles of packed sequences in Hopper's forward: which of them a program takes, and their loads.

No store of a tile touches rows of other sequences, because descriptors cut them off: each has two
dimensions of rows, of the same stride. Rows are `BOX` at a time, the length of the inner one. To
take ``there`` rows from `first` on, a box of a descriptor of stores or of pages begins at ``first
+ there`` in the outer dimension and at ``BOX - there`` in the inner one, BOX rows before which the
tensor's memory begins: its other rows are outside of the inner dimension. They load as 0 and
aren't stored.

A descriptor of other loads begins with the tensor, and a box begins BOX rows earlier in the outer
dimension: an H200 has faulted at loads whose descriptors begin before mapped memory. Only a
sequence that ends within the tensor's first BOX rows is loaded together with rows behind it, which
no result depends on.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anyflex_cuda.smem_mailbox import WORDS, said, say
from anyflex_cuda.split_tiles import load_box, load_parts, reinterpret, store_parts
from anyflex_triton.device_functions import (
    SequenceTile,
    record,
    sequence_of_tile,
)

__all__ = [
    "PACKED_BLOCK",
    "begin_walk",
    "load_bounded",
    "load_sequence_keys",
    "page_numbers",
    "paged_buffers",
    "place_of_item",
    "said_tile",
    "say_tile",
    "store_bounded",
    "walked",
]


@record
class Walk:
    """Place of a program in the list of tiles: heads by groups, and for each group the rows of
    blocks, the last ones first, 32 at a time.

    Attributes:
        first_head: of the group.
        last_row: the first of 32 rows of blocks that the program looks at.
        before: number of items before these.
        ranks: [32], number of rows with tiles up to each, itself included; 0 for one without.
        live: number of rows with tiles.
    """

    first_head: Any
    last_row: Any
    before: Any
    ranks: Any
    live: Any


# Argument lists would be a line an argument.
# fmt: off

PACKED_BLOCK = gl.constexpr(128)
"""Query rows of an entry of `PackedRows.blocks`."""
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def added(x, y):
    return x + y


@gluon.jit
def rows_with_tiles(sequences, last_row, short_rows):
    """Return (ranks, live) of `Walk` for the 32 rows of blocks up to `last_row`, from it down."""
    count = sequences[8]
    row = last_row - gl.arange(0, 32, layout=LANES)
    owner = gl.load(sequences[0] + row * 2, mask=row >= 0, other=-1)
    there = (owner >= 0) & (owner < count)
    begin = gl.load(sequences[1] + owner, mask=there, other=0)
    end = gl.load(sequences[1] + owner + 1, mask=there, other=0)
    found = gl.where((owner == count) | (there & (end - begin > short_rows)), 1, 0)
    return gl.associative_scan(found, 0, added) * found, gl.sum(found, 0)


@gluon.jit
def begin_walk(sequences, rows, short_rows):
    """Return the `Walk` at the first tile.

    Args:
        rows: number of rows of blocks.
        short_rows: sequences with at most this many query rows have no tiles.
    """
    ranks, live = rows_with_tiles(sequences, rows - 1, short_rows)
    nothing = rows * 0
    return Walk(
        first_head=nothing, last_row=rows - 1, before=nothing, ranks=ranks, live=live,
    )


@gluon.jit
def items_of_rows(walk, schedule, TILES: gl.constexpr):
    """Return the number of tiles of the walk's rows in its group of heads."""
    size = gl.minimum(schedule.head_group, schedule.heads - walk.first_head)
    return walk.live * (size * TILES)


@gluon.jit
def walked(walk, item, sequences, schedule, rows, short_rows, TILES: gl.constexpr):
    """Return the `Walk` at the rows that have an item; where there are fewer items, its first_head
    isn't one.

    Args:
        item: number of a tile, counted over all programs; it never falls.
        rows, short_rows: as in `begin_walk`.
        TILES: number of tiles of a row of blocks.
    """
    count = items_of_rows(walk, schedule, TILES)
    while (walk.first_head < schedule.heads) & (item >= walk.before + count):
        last_row = walk.last_row - 32
        first_head = walk.first_head
        if last_row < 0:
            last_row = rows - 1
            first_head += schedule.head_group
        ranks, live = rows_with_tiles(sequences, last_row, short_rows)
        walk = Walk(
            first_head=first_head, last_row=last_row, before=walk.before + count, ranks=ranks,
            live=live,
        )
        count = items_of_rows(walk, schedule, TILES)
    return walk


@gluon.jit
def place_of_item(
    walk, item, sequences, schedule, q_length, PAGE: gl.constexpr, TILES: gl.constexpr
):
    """Return (`SequenceTile`, head) of an item of the walk's rows. The heads of a group come one
    after the other, because those of a KV head share its keys."""
    size = gl.minimum(schedule.head_group, schedule.heads - walk.first_head)
    at = item - walk.before
    tile = at // size
    row = walk.last_row - gl.arange(0, 32, layout=LANES)
    row = gl.sum(gl.where(walk.ranks == tile // TILES + 1, row, 0), 0)
    # A sequence's last rows have the most keys under causal masks.
    number = row * TILES + (TILES - 1 - tile % TILES)
    found = sequence_of_tile(
        sequences, number, q_length, PACKED_BLOCK, PAGE, PACKED_BLOCK // TILES,
    )
    return found, walk.first_head + at % size


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
        end_row=end_row, last_row=end_row - 1, nobodys=None, b=said(words, c * WORDS + 3),
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
    """Store rows from `first` on and before `end`, asynchronously."""
    ROWS: gl.constexpr = bufs[0].shape[3]
    there = rows_there(first, end, ROWS)
    store_parts(descs, bufs, ME, h, first + there, ROWS - there)


@gluon.jit
def page_numbers(pages, first, end, descs, ROWS: gl.constexpr):
    """Return the numbers of the pages of each box of a step's ROWS keys: a tuple. What the table
    has beyond `end` isn't followed, and all are inside of the pool."""
    BOX: gl.constexpr = descs[0].block_shape[3]
    numbers = descs[:0]
    for i in gl.static_range(ROWS // BOX):
        key = first + i * BOX
        number = gl.load(pages.table + key // pages.SIZE, mask=key < end, other=0)
        numbers = numbers + (gl.maximum(gl.minimum(number, pages.last), 0),)
    return numbers


@gluon.jit
def load_part_of_pages(
    desc, buf, slot, full, kv_head, numbers, first, end, first_column: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Load one part's columns for `load_pages`."""
    BOX: gl.constexpr = desc.block_shape[3]
    WIDTH: gl.constexpr = desc.block_shape[4]
    BOXES: gl.constexpr = buf.shape[3] // BOX
    BESIDE: gl.constexpr = buf.shape[4] // WIDTH
    SHAPE: gl.constexpr = [buf.shape[0] * BESIDE * BOXES, 1, 1, 1, BOX, WIDTH]
    DTYPE: gl.constexpr = desc.dtype
    LAYOUT: gl.constexpr = desc.layout
    pieces = reinterpret(buf, DTYPE, SHAPE, LAYOUT)
    for i in gl.static_range(BOXES):
        key = first + i * BOX
        there = rows_there(key, end, BOX)
        row = key % PAGE + there
        if i > 0:
            # The address of a box without rows, by its outer dimensions alone, must be in the
            # tensor too: an H200 faults at others.
            row = gl.where(there > 0, row, BOX)
        for c in gl.static_range(BESIDE):
            at = [numbers[i], kv_head, row, BOX - there, first_column + c * WIDTH]
            load_box(desc, at, full, pieces.index((slot * BESIDE + c) * BOXES + i))


@gluon.jit
def load_pages(descs, bufs, slot, full, kv_head, numbers, first, end, PAGE: gl.constexpr):
    """Load keys from `first` on, and 0 from `end` on, into a slot of each part's buffers, which
    hold 64 columns of all rows after the other.

    Args:
        numbers: from `page_numbers`.
    """
    for p in gl.static_range(len(bufs)):
        load_part_of_pages(
            descs[p], bufs[p], slot, full, kv_head, numbers, first, end, p * bufs[0].shape[4],
            PAGE,
        )


@gluon.jit
def load_sequence_keys(descs, bufs, slot, full, tile, numbers, first, end):
    """Load a step's keys, or values, of a tile's sequence into a slot of each part's buffers.

    Args:
        tile: `hopper_forward.LoadedTile`.
        numbers: from `page_numbers`; None for packed keys.
    """
    if tile.pages is None:
        begin = tile.own.kv_begin
        load_bounded(descs, bufs, slot, full, tile.kv_head, begin + first, begin + end)
    else:
        load_pages(descs, bufs, slot, full, tile.kv_head, numbers, first, end, tile.pages.SIZE)


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
        SECOND: gl.constexpr = descs[1].block_shape[4]
        return (
            paged_buffer(descs[0], ROOMS, ROWS, D - SECOND),
            paged_buffer(descs[1], ROOMS, ROWS, SECOND),
        )
