"""The kernel that decides PARTIAL blocks of a mask tile by tile: see mask_rows.py."""

from __future__ import annotations

import triton
import triton.language as tl

from anyflex_triton.tiles import FULL, PARTIAL

__all__ = ["finer_kernel"]

# Argument lists would be a line an argument.
# fmt: off


@triton.jit
def joined(new_runs, place, begin, end, kind, first, stop, new_kind):
    """(place, begin, end, kind) of the run that is open, after a piece whose kind may be 0 for
    none; a run that ends is stored."""
    joins = (kind == new_kind) & (end == first)
    over = ~joins & (kind != 0) & (new_kind != 0)
    at = new_runs + place * 3
    tl.store(at, begin, mask=over)
    tl.store(at + 1, end, mask=over)
    tl.store(at + 2, kind, mask=over)
    opens = ~joins & (new_kind != 0)
    return (
        place + over.to(tl.int32),
        tl.where(opens, first, begin),
        tl.where(joins | opens, stop, end),
        tl.where(opens, new_kind, kind),
    )


@triton.jit
def finer_kernel(
    offsets, runs, new_edges, new_runs, tables, ints, floats, shifts, length, column_length,
    tiles, columns, MASK_MOD: tl.constexpr, TRANSPOSED: tl.constexpr, ROW_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """One program a row of tiles.

    Args:
        offsets, runs: the mask's, or where TRANSPOSED of the transposed mask; the same for all
            batch entries and heads.
        new_edges: [2, tiles], where in new_runs a row's begin, and where they end.
        new_runs: [tiles, columns, 3]; `columns` is how many tiles a row has.
        length, column_length: of queries and keys, or the other way round.
    """
    PARTS: tl.constexpr = COLUMN_BLOCK // COLUMNS
    tile = tl.program_id(0)
    block = tile // (ROW_BLOCK // ROWS)
    rows = tile * ROWS + tl.arange(0, ROWS)
    row_inside = (rows < length)[:, None]
    rows = tl.minimum(rows, length - 1)[:, None]
    first_place = tile * columns
    place = first_place
    begin = 0
    end = 0
    kind = 0
    for r in range(tl.load(offsets + block), tl.load(offsets + block + 1)):
        first = tl.load(runs + r * 3) * PARTS
        stop = tl.minimum(tl.load(runs + r * 3 + 1) * PARTS, columns)
        if tl.load(runs + r * 3 + 2) == FULL:
            place, begin, end, kind = joined(
                new_runs, place, begin, end, kind, first, stop, FULL,
            )
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
                some = tl.max(tl.max((kept & inside).to(tl.int32), 1), 0)
                every = tl.min(tl.min((kept | ~inside).to(tl.int32), 1), 0)
                found = tl.where(every != 0, FULL, tl.where(some != 0, PARTIAL, 0))
                place, begin, end, kind = joined(
                    new_runs, place, begin, end, kind, column, column + 1, found,
                )
    if kind != 0:
        tl.store(new_runs + place * 3, begin)
        tl.store(new_runs + place * 3 + 1, end)
        tl.store(new_runs + place * 3 + 2, kind)
        place += 1
    tl.store(new_edges + tile, first_place)
    tl.store(new_edges + tiles + tile, place)
