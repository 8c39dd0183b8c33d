"""Kernels that classify PARTIAL blocks of a mask tile by tile: see mask_refinement.py."""

from __future__ import annotations

import triton
import triton.language as tl

from anyflex_triton.tiles import FULL, PARTIAL

__all__ = ["kinds_kernel", "runs_kernel"]

# Argument lists would be a line an argument.
# fmt: off


@triton.jit
def kinds_kernel(
    offsets, runs, kinds, tables, ints, floats, shifts, length, column_length, columns, chunks,
    MASK_MOD: tl.constexpr, TRANSPOSED: tl.constexpr, ROW_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):
    """Classify a chunk of CHUNK tiles of a row of tiles; one program per chunk.

    Args:
        offsets, runs: those of the mask, or of the transposed mask where TRANSPOSED; the same for
            all batch entries and heads.
        kinds: int8 [tiles, columns]: FULL, PARTIAL, or 0 where no pair of the tile is live.
        length, column_length: numbers of queries and keys, or of keys and queries where
            TRANSPOSED.
        columns: number of tiles of a row; chunks: number of its chunks.
    """
    # Both counts of a tile fit 16 bits.
    tl.static_assert(ROWS * COLUMNS < 1 << 15)
    PARTS: tl.constexpr = COLUMN_BLOCK // COLUMNS
    tile = tl.program_id(0) // chunks
    chunk = (tl.program_id(0) % chunks) * CHUNK
    block = tile // (ROW_BLOCK // ROWS)
    rows = tile * ROWS + tl.arange(0, ROWS)
    row_inside = (rows < length)[:, None]
    rows = tl.minimum(rows, length - 1)[:, None]
    places = chunk + tl.arange(0, CHUNK)
    found = tl.zeros([CHUNK], tl.int32)
    for r in range(tl.load(offsets + block), tl.load(offsets + block + 1)):
        first = tl.maximum(tl.load(runs + r * 3) * PARTS, chunk)
        stop = tl.minimum(tl.minimum(tl.load(runs + r * 3 + 1) * PARTS, columns), chunk + CHUNK)
        if tl.load(runs + r * 3 + 2) == FULL:
            found = tl.where((places >= first) & (places < stop), FULL, found)
        else:
            for column in range(first, stop):
                keys = column * COLUMNS + tl.arange(0, COLUMNS)
                inside = row_inside & (keys < column_length)[None, :]
                keys = tl.minimum(keys, column_length - 1)[None, :]
                if TRANSPOSED:
                    kept = MASK_MOD(
                        shifts[0], shifts[1], keys + shifts[2], rows + shifts[3], tables, ints,
                        floats,
                    )
                else:
                    kept = MASK_MOD(
                        shifts[0], shifts[1], rows + shifts[2], keys + shifts[3], tables, ints,
                        floats,
                    )
                # One sum holds both counts: that of live pairs, and 65536 times that of dead ones.
                counts = tl.where(kept, 1, 1 << 16)
                count = tl.sum(tl.sum(tl.where(inside, counts, 0), 1), 0)
                kind = tl.where(count & 0xFFFF == 0, 0, tl.where(count >> 16 == 0, FULL, PARTIAL))
                found = tl.where(places == column, kind, found)
    tl.store(kinds + tile * columns + places, found.to(tl.int8), mask=places < columns)


@triton.jit
def runs_kernel(kinds, new_edges, new_runs, tiles, columns, CHUNK: tl.constexpr):
    """Join neighbouring tiles of one kind to a run; one program per row of tiles.

    Args:
        kinds: output of `kinds_kernel`.
        new_edges: int32 [2, tiles], positions in new_runs where a row's runs begin, and where they
            end.
        new_runs: int32 [tiles, columns, 3].
    """
    tile = tl.program_id(0)
    place = tile * columns
    tl.store(new_edges + tile, place)
    for begin in range(0, columns, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        of_row = kinds + tile * columns + at
        kind = tl.load(of_row, mask=at < columns, other=0).to(tl.int32)
        before = tl.load(of_row - 1, mask=(at > 0) & (at <= columns), other=0).to(tl.int32)
        after = tl.load(of_row + 1, mask=at + 1 < columns, other=0).to(tl.int32)
        opens = (kind != 0) & (kind != before)
        closes = (kind != 0) & (kind != after)
        run = new_runs + (place + tl.cumsum(opens.to(tl.int32), 0) - 1) * 3
        tl.store(run, at, mask=opens)
        tl.store(run + 1, at + 1, mask=closes)
        tl.store(run + 2, kind, mask=opens)
        place += tl.sum(opens.to(tl.int32), 0)
    tl.store(new_edges + tiles + tile, place)
