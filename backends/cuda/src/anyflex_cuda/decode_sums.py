"""Combination of the parts of each query row after Hopper's decoding, where a unit has too many
for one of that kernel's programs."""

from __future__ import annotations

import triton
import triton.language as tl

from anyflex_cuda.decode_steps import (
    counts_floats,
    part_place,
    program_of,
    steps_of_unit,
    sums_place,
    total_steps,
)
from anyflex_cuda.packed_steps import rows_of_sequence
from anyflex_triton.device_functions import LOG2E, RowResults, store_row

__all__ = ["combine_kernel"]

# Argument lists would be a line an argument.
# fmt: off


@triton.jit
def combine_kernel(
    partial_out, out, rest, tops, lse, max_scores, o_strides, edges, scale, sinks, sequences,
    batch, heads, q_length, unit_steps, most_rows, programs, groups, GROUP: tl.constexpr,
    PLAN: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr, PARTS: tl.constexpr,
    UNIT: tl.constexpr, SCORED: tl.constexpr, WANT_LSE: tl.constexpr, WANT_MAX: tl.constexpr,
    WANT_REST: tl.constexpr,
):
    """Combine the parts of one query row per program, in the order of their keys, PARTS at a time.
    Rows of units that one program had are written already. Of a packed call there is a program for
    each row that a sequence may have.

    Args:
        partial_out, edges, unit_steps, most_rows: as in `hopper_decode.decode_kernel`.
        programs: number of that kernel's programs. groups: number of groups of them.
        SCORED: whether there is a score mod.
    """
    row = tl.program_id(0) % most_rows
    bh = tl.program_id(0) // most_rows
    b = bh // heads
    h = bh % heads
    kv_heads = heads // GROUP
    kv_head = h // GROUP
    partial_out += counts_floats(batch * kv_heads)
    partial_sums = partial_out + sums_place(programs, GROUP * most_rows, VALUE_DIM)
    rows = q_length
    at = (bh.to(tl.int64)) * q_length + row
    live = programs
    if sequences is not None:
        live = tl.load(edges + batch + 1)
        groups = tl.load(edges + batch + 2)
        first_row, rows = rows_of_sequence(sequences, b, q_length)
        at = h.to(tl.int64) * q_length + first_row + row
    total_count = total_steps(edges, batch, kv_heads, unit_steps, PLAN)
    begin, count = steps_of_unit(edges, b, kv_head, kv_heads, unit_steps, PLAN)
    first_program = program_of(begin, live, total_count, groups)
    last_program = program_of(begin + count - 1, live, total_count, groups)
    parts = tl.where(count > 0, last_program + 1 - first_program, 0)
    if parts == 1:
        return
    # Sequences without steps are another kernel's.
    if sequences is not None and (parts == 0) | (row >= rows):
        return
    row_of_unit = h % GROUP * rows + row
    index = tl.arange(0, PARTS)
    dims = tl.arange(0, DV)
    score_unit = LOG2E if SCORED else scale * LOG2E
    row_max = float("-inf")
    row_sum = 0.0
    nan = 0.0
    acc = tl.zeros([DV], tl.float32)
    for first in range(0, parts, PARTS):
        there = first + index < parts
        place = part_place(first_program, first + index).to(tl.int64) * (GROUP * most_rows)
        place += row_of_unit
        # All loads are issued together, because their latency dominates.
        highest = tl.load(partial_sums + place * 3, mask=there, other=float("-inf"))
        sums = tl.load(partial_sums + place * 3 + 1, mask=there, other=0.0)
        if WANT_MAX:
            nans = tl.load(partial_sums + place * 3 + 2, mask=there, other=0.0)
            nan = tl.maximum(nan, tl.max(nans, 0))
        part = tl.load(
            partial_out + place[:, None] * VALUE_DIM + dims[None, :],
            mask=there[:, None] & (dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        new_max = tl.maximum(row_max, tl.max(highest, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = tl.exp2((row_max - shift) * score_unit)
        factor = tl.exp2((highest - shift) * score_unit)
        row_sum = row_sum * alpha + tl.sum(sums * factor, 0)
        acc = acc * alpha + tl.sum(part * factor[:, None], 0)
        row_max = new_max
    results = RowResults(
        tops=tops, lse=lse, max_scores=max_scores, SCORED=SCORED, WANT_LSE=WANT_LSE,
        WANT_MAX=WANT_MAX, WANT_TOPS=WANT_REST, sinks=sinks,
    )
    store_row(
        acc, row_max, row_sum, nan, at, out, rest, o_strides, scale, results, heads, q_length,
        VALUE_DIM, DV, UNIT, WANT_REST,
    )
