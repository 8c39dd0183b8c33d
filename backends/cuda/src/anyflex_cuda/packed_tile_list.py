"""The list of tiles of packed sequences that Hopper's forward takes, made once a step.

Only bounds are known on the host. One program goes through the rows of blocks and writes a record
for each tile of those that have some: a program of each layer's kernel then finds all that it
loads a tile by in one place, where it would follow five pointers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyflex_triton.device_functions import (
    FULL,
    line_of_sequence,
    mask_row,
    sequence_of_tile,
)

__all__ = ["LISTED_RUNS", "LIST_HEADER", "PACKED_BLOCK", "RUNS_PLACE", "TILE_WORDS", "tile_kernel"]

# Argument lists would be a line an argument.
# fmt: off

PACKED_BLOCK = tl.constexpr(128)
"""Query rows of an entry of `PackedRows.blocks`."""
LIST_HEADER = tl.constexpr(4)
"""Words before the records: the number of tiles of a head, and whether the records' steps are
those of all heads."""
TILE_WORDS = tl.constexpr(32)
"""Words of a record: row of blocks, number of the sequence, first and end row of query, what mods
see as b, what is added to rows for q_idx, first row of packed keys, number of keys, line of the
page table, first run, end of the runs, number of steps that may have dead pairs, and of others,
then the first LISTED_RUNS runs. A warp loads it at once."""
RUNS_PLACE = tl.constexpr(13)
"""Number of a record's word that its runs begin at."""
LISTED_RUNS = tl.constexpr(6)
"""Maximum number of a tile's runs that its record holds."""
_LANES = tl.constexpr(256)
"""Rows of blocks that are looked at together."""


@triton.jit
def store_steps(
    place, there, run, last_run, kv_length, runs, HAS_MASK: tl.constexpr, KV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store the runs of several tiles, and the numbers of their steps."""
    if HAS_MASK:
        masked = kv_length * 0
        plain = kv_length * 0
        for i in range(tl.max(tl.where(there, last_run - run, 0), 0)):
            index = run + i
            live = there & (index < last_run)
            at = runs + index * 3
            begin = tl.load(at, mask=live, other=0)
            end = tl.load(at + 1, mask=live, other=0)
            kind = tl.load(at + 2, mask=live, other=0)
            listed = place + RUNS_PLACE + i * 3
            tl.store(listed, begin, mask=live & (i < LISTED_RUNS))
            tl.store(listed + 1, end, mask=live & (i < LISTED_RUNS))
            tl.store(listed + 2, kind, mask=live & (i < LISTED_RUNS))
            # The mask may be one of other lengths.
            length = tl.minimum(end * KV_BLOCK, kv_length) - begin * KV_BLOCK
            length = tl.maximum(length, 0)
            whole = tl.where(kind == FULL, length // BLOCK_N, 0)
            plain += whole
            masked += (length + BLOCK_N - 1) // BLOCK_N - whole
    else:
        plain = kv_length // BLOCK_N
        masked = (kv_length + BLOCK_N - 1) // BLOCK_N - plain
    tl.store(place + 9, run, mask=there)
    tl.store(place + 10, last_run, mask=there)
    tl.store(place + 11, masked, mask=there)
    tl.store(place + 12, plain, mask=there)


@triton.jit
def tile_kernel(
    offsets, ends, runs, mask_strides, sequences, tile_list, q_length, short_rows, rows,
    HAS_MASK: tl.constexpr, OF_HEADS: tl.constexpr, PAGE: tl.constexpr, KV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Kernel of one program that lists tiles of PACKED_BLOCK query rows, those of the last rows of
    blocks first: a sequence's last rows have the most keys under causal masks. A block without
    rows has none, because TMA could load none of its queries.

    Args:
        offsets, ends, runs, mask_strides: as in `anyflex_triton.forward`.
        tile_list: int32 [LIST_HEADER + rows * TILE_WORDS].
        short_rows: sequences with at most this many query rows have no tiles.
        rows: number of rows of blocks.
        OF_HEADS: whether each head has a mask of its own, and no steps are listed.
    """
    count = sequences[8]
    lanes = tl.arange(0, _LANES)
    before = 0
    for first in range(0, rows, _LANES):
        row = rows - 1 - first - lanes
        owner = tl.load(sequences[0] + row * 2, mask=row >= 0, other=-1)
        there = (owner >= 0) & (owner < count)
        begin = tl.load(sequences[1] + owner, mask=there, other=0)
        end = tl.load(sequences[1] + owner + 1, mask=there, other=0)
        length = tl.minimum(end, q_length) - tl.maximum(begin, 0)
        row = tl.maximum(row, 0)
        tile = sequence_of_tile(sequences, row, q_length, PACKED_BLOCK, PAGE, PACKED_BLOCK)
        live = (owner == count) | (there & (length > short_rows))
        live = live & (tile.first_row < tile.end_row)
        ones = tl.where(live, 1, 0)
        rank = before + tl.cumsum(ones, 0) - 1
        before += tl.sum(ones, 0)
        place = tile_list + LIST_HEADER + rank * TILE_WORDS
        tl.store(place, row, mask=live)
        tl.store(place + 1, tile.owner, mask=live)
        tl.store(place + 2, tile.first_row, mask=live)
        tl.store(place + 3, tile.end_row, mask=live)
        tl.store(place + 4, tile.b, mask=live)
        tl.store(place + 5, tile.shift, mask=live)
        tl.store(place + 6, lanes * 0 + tile.kv_begin, mask=live)
        tl.store(place + 7, tile.kv_length, mask=live)
        if PAGE > 0:
            tl.store(place + 8, line_of_sequence(sequences, tile.owner), mask=live)
        if not OF_HEADS:
            run, last_run = mask_row(offsets, ends, mask_strides, 0, 0, row, HAS_MASK)
            store_steps(
                place, live, lanes * 0 + run, lanes * 0 + last_run, tile.kv_length, runs,
                HAS_MASK, KV_BLOCK, BLOCK_N,
            )
    tl.store(tile_list, before)
    tl.store(tile_list + 1, 0 if OF_HEADS else 1)
