"""End of a unit in Hopper's decoding: its rows are written, or a part of their sums.

A unit (decode_steps.py) that several programs share has a part from each. Which of them ends last
isn't known beforehand. So each increments a counter in memory, and the one that finds all others
counted adds up the parts, in the order of their keys, so that results repeat.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anyflex_cuda.decode_steps import part_place
from anyflex_cuda.write_softmax_stats import natural_base, with_sinks, write_row_sums
from anyflex_triton.device_functions import LOG2E, record

__all__ = [
    "MOST_COUNTED",
    "Unit",
    "UnitOutputs",
    "add_parts",
    "begin_count",
    "counted",
    "rows_of_unit",
    "write_dead",
    "write_rows",
]


@record
class Unit:
    """A KV head of a batch entry, or of a packed sequence.

    Attributes:
        entry: number of the batch entry, or of the sequence. b: batch entry in query and out.
        first_row, rows: first query row in each head, and their number.
        mod_b: what mods see as b. q_shift: what is added to rows for q_idx.
        keys: `packed_steps.KeyPlaces`.
    """

    entry: Any
    b: Any
    kv_head: Any
    first_row: Any
    rows: Any
    mod_b: Any
    q_shift: Any
    keys: Any


@record
class UnitOutputs:
    """Output tensors of units' rows, and their shapes.

    Attributes:
        q_length: query rows of a head in all. most_rows: as in `hopper_decode.decode_kernel`.
        o_strides: (b, h, row) of out, in units of UNIT elements. rest is contiguous.
        results: `anyflex_triton.kernel_records.RowResults`.
        GROUP: query heads of a unit. VALUE_DIM: columns of a row. DV: columns of a tile.
        WANT_REST: whether rest is written.
    """

    out: Any
    rest: Any
    o_strides: Any
    results: Any
    scale: Any
    kv_heads: Any
    q_length: Any
    most_rows: Any
    GROUP: Any
    VALUE_DIM: Any
    DV: Any
    UNIT: Any
    WANT_REST: Any


# Argument lists would be a line an argument.
# fmt: off

MOST_COUNTED = gl.constexpr(1 << 16)
"""Upper bound of a unit's count of parts. Marks are multiples of it; programs are fewer."""
_AT_ONCE = gl.constexpr(16)
"""Number of parts loaded at a time. Twice as many run out of registers with some mods."""


@gluon.jit
def rows_of_unit(packed, unit, GROUP: gl.constexpr):
    """Return (whether it is a row of the `Unit`, its query head, its query row) of packed rows.
    Rows past the unit get indices that exist."""
    inside = packed < GROUP * unit.rows
    head = unit.kv_head * GROUP + gl.minimum(packed // unit.rows, GROUP - 1)
    return inside, head, packed % unit.rows


@gluon.jit
def begin_count(word, found, mark):
    """Initialize a unit's counter, if no other program of this launch has done so.

    The counters are in uninitialized memory, because zeroing it would take another kernel. A
    counter is valid if it is less than MOST_COUNTED above the mark, a random number of this
    process. The program that writes a unit's rows leaves 0 there for the next launch.

    Args:
        word: pointer to the int64 counter. found: its value, loaded by each thread; threads may
            have loaded different values.
        mark: the process's mark, the same in all launches.
    """
    counts = (found >= mark) & (found < mark + MOST_COUNTED)
    # There is no branch because threads may disagree.
    gl.atomic_cas(word, found, gl.where(counts, found, mark), sem="relaxed")


@gluon.jit
def counted(word, mark):
    """Count a part that all threads have written. Return how many were counted before; after the
    last one all parts can be read."""
    return gl.atomic_add(word, 1, sem="acq_rel") - mark


@gluon.jit
def places_of(
    first, parts, first_row, outputs, unit, TILE_ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):
    """Return (places after the first part's, whether they exist) of rows of parts, each [_AT_ONCE,
    TILE_ROWS]."""
    index = gl.expand_dims(first + gl.arange(0, _AT_ONCE, layout=gl.SliceLayout(1, LAYOUT)), 1)
    rows = gl.expand_dims(first_row + gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(0, LAYOUT)), 0)
    place = part_place(0, index) - part_place(0, 0)
    there = (index < parts) & (rows < outputs.GROUP * unit.rows)
    return place * (outputs.GROUP * outputs.most_rows) + rows, there


@gluon.jit
def add_parts(partial_out, partial_sums, first_program, parts, outputs, unit):
    """Write a unit's rows from its parts.

    Args:
        partial_out, partial_sums: as in `hopper_decode.decode_kernel`.
        first_program: the one that has the first part. parts: number of parts.
        outputs: `UnitOutputs`. unit: `Unit`.
    """
    DV: gl.constexpr = outputs.DV
    VALUE_DIM: gl.constexpr = outputs.VALUE_DIM
    if outputs.results.SCORED:
        log_unit = LOG2E
    else:
        log_unit = outputs.scale * LOG2E
    begin = gl.cast(part_place(first_program, 0), gl.int64) * (outputs.GROUP * outputs.most_rows)
    partial_out += begin * VALUE_DIM
    partial_sums += begin * 3
    # Each thread loads 16 bytes of each part.
    LANES: gl.constexpr = DV // 4
    TILE_ROWS: gl.constexpr = 128 // LANES
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [1, 32 // LANES, LANES], [1, 4, 1], [2, 1, 0],
    )
    TILE: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, TILE)
    OF_PARTS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    # One lane per part, so that each sum is loaded once.
    SUMS: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, 4], [1, 0])
    columns = gl.arange(0, DV, layout=gl.SliceLayout(0, TILE))
    columns = gl.expand_dims(gl.expand_dims(columns, 0), 0)
    for first_row in range(0, outputs.GROUP * unit.rows, TILE_ROWS):
        row_max = gl.full([TILE_ROWS], float("-inf"), gl.float32, layout=OF_ROWS)
        row_sum = gl.full([TILE_ROWS], 0.0, gl.float32, layout=OF_ROWS)
        nans = gl.full([TILE_ROWS], 0.0, gl.float32, layout=OF_ROWS)
        acc = gl.full([TILE_ROWS, DV], 0.0, gl.float32, layout=TILE)
        for first in range(0, parts, _AT_ONCE):
            # Loads bypass L1 (.cg), which may hold lines from before another program wrote them.
            place, there = places_of(first, parts, first_row, outputs, unit, TILE_ROWS, SUMS)
            sums = partial_sums + place * 3
            highest = gl.load(sums, mask=there, other=float("-inf"), cache_modifier=".cg")
            totals = gl.load(sums + 1, mask=there, other=0.0, cache_modifier=".cg")
            if outputs.results.WANT_MAX:
                found = gl.load(sums + 2, mask=there, other=0.0, cache_modifier=".cg")
                nans = gl.maximum(nans, gl.convert_layout(gl.max(found, 0), OF_ROWS))
            place, there = places_of(
                first, parts, first_row, outputs, unit, TILE_ROWS, OF_PARTS,
            )
            values = gl.load(
                partial_out + gl.expand_dims(place, 2) * VALUE_DIM + columns,
                mask=gl.expand_dims(there, 2) & (columns < VALUE_DIM), other=0.0,
                cache_modifier=".cg",
            )
            new_max = gl.maximum(row_max, gl.convert_layout(gl.max(highest, 0), OF_ROWS))
            shift = gl.where(new_max == float("-inf"), 0.0, new_max)
            alpha = gl.exp2((row_max - shift) * log_unit)
            shift = gl.convert_layout(shift, gl.SliceLayout(0, SUMS))
            factor = gl.exp2((highest - gl.expand_dims(shift, 0)) * log_unit)
            row_sum = row_sum * alpha + gl.convert_layout(gl.sum(totals * factor, 0), OF_ROWS)
            factor = gl.expand_dims(gl.convert_layout(factor, OF_PARTS), 2)
            acc = acc * gl.expand_dims(alpha, 1) + gl.sum(values * factor, 0)
            row_max = new_max
        write_rows(
            acc, row_max, row_sum, nans, first_row, outputs, unit, TILE_ROWS, TILE,
        )


@gluon.jit
def write_dead(outputs, unit):
    """Write the rows of a `Unit` that sees no key."""
    DV: gl.constexpr = outputs.DV
    LANES: gl.constexpr = DV // 4
    TILE_ROWS: gl.constexpr = 128 // LANES
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, TILE)
    zeros = gl.full([TILE_ROWS], 0.0, gl.float32, layout=OF_ROWS)
    for first_row in range(0, outputs.GROUP * unit.rows, TILE_ROWS):
        write_rows(
            gl.full([TILE_ROWS, DV], 0.0, gl.float32, layout=TILE),
            gl.full([TILE_ROWS], float("-inf"), gl.float32, layout=OF_ROWS), zeros, zeros,
            first_row, outputs, unit, TILE_ROWS, TILE,
        )


@gluon.jit
def write_rows(
    acc, row_max, row_sum, nans, first_row, outputs, unit, TILE_ROWS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Write the wanted outputs of a `Unit`'s packed rows from `first_row` on, like
    `decode.store_row`.

    Args:
        acc: [TILE_ROWS, DV], accumulator of weighted values, in LAYOUT.
        row_max, row_sum, nans: arguments of `write_row_sums`, [TILE_ROWS].
    """
    strides = outputs.o_strides
    VALUE_DIM: gl.constexpr = outputs.VALUE_DIM
    packed = first_row + gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    inside, head, row = rows_of_unit(packed, unit, outputs.GROUP)
    row += unit.first_row
    dead = (row_max == float("-inf")) & (row_sum == row_sum)
    base = natural_base(row_max, outputs.scale, outputs.results)
    whole = with_sinks(row_sum, row_max, base, head, outputs.results)
    inverse = 1.0 / gl.where(dead, 1.0, whole)
    acc = gl.where(gl.expand_dims(dead, 1), 0.0, acc * gl.expand_dims(inverse, 1))
    columns = gl.expand_dims(gl.arange(0, outputs.DV, layout=gl.SliceLayout(0, LAYOUT)), 0)
    there = gl.expand_dims(inside, 1) & (columns < VALUE_DIM)
    rounded = acc.to(outputs.out.dtype.element_ty)
    of_rows = (
        gl.cast(unit.b, gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
        + row.to(gl.int64) * strides[2]
    ) * outputs.UNIT
    gl.store(outputs.out + gl.expand_dims(of_rows, 1) + columns, rounded, mask=there)
    heads = outputs.kv_heads * outputs.GROUP
    at = (gl.cast(unit.b, gl.int64) * heads + head) * outputs.q_length + row
    if outputs.WANT_REST:
        lost = acc - rounded.to(gl.float32)
        rest_at = outputs.rest + gl.expand_dims(at * VALUE_DIM, 1) + columns
        gl.store(rest_at, lost.to(outputs.rest.dtype.element_ty), mask=there)
    write_row_sums(
        row_max, row_sum, whole, 0.0, nans, at, inside, outputs.scale, outputs.results,
    )
