"""Steps of packed sequences in Hopper's decoding: a unit is a KV head of a sequence.

Only bounds are known on the host. One program counts the steps of all sequences from their lengths
and cuts them into shares, once for all layers of a step: each program of each layer's kernel would
take 3 us for that before its first load. Under a mask another kernel lists each sequence's steps
before. A sequence whose rows nobody else writes, but that has no key to see, has one step without
keys; one that isn't decoded has none.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from anyflex_cuda.decode_steps import list_runs, share_of
from anyflex_triton.device_functions import line_of_sequence, mask_row, record

__all__ = [
    "COUNTS",
    "SHARE_FACTS",
    "SHARE_WORDS",
    "KeyPlaces",
    "key_places",
    "list_kernel",
    "lists_place",
    "page_at",
    "rows_of_sequence",
    "share_kernel",
    "shares_place",
    "unit_facts",
]

# Argument lists would be a line an argument.
# fmt: off

COUNTS = tl.constexpr(2)
"""Numbers behind the edges: programs that have a share, and groups of them."""
SHARE_WORDS = tl.constexpr(16)
"""Numbers of a program's share: its first step, the end, the sequence of the first step, the steps
of all earlier sequences and of this one's units, and its `unit_facts`; the rest aligns the next
share. So a program needs no other numbers for its first loads."""
SHARE_FACTS = tl.constexpr(5)
"""Place of `unit_facts` in a share."""
_LANES = tl.constexpr(256)
"""Sequences, or programs, that `share_kernel` looks at together."""
_LEAST_STEPS = tl.constexpr(2)
"""Minimum number of steps of a share, on average. A shorter one costs more in combining parts than
it saves."""


@record
class KeyPlaces:
    """Where a sequence's keys are.

    Attributes:
        first_row: in packed keys. table: pointer to its line of the page table.
        last_page: number of the pool's last page.
        length: number of keys.
    """

    first_row: Any
    table: Any
    last_page: Any
    length: Any


@triton.jit
def rows_of_sequence(sequences, s, total_rows):
    """Return (first row, number) of query rows of a sequence, or of several.

    Numbers on a device may break their bounds; no result is outside of the tensors.

    Args:
        sequences: as in `anyflex_triton.kernel_arguments`. total_rows: number of query rows.
    """
    q_offsets = sequences[1]
    begin = tl.minimum(tl.maximum(tl.load(q_offsets + s), 0), total_rows)
    end = tl.minimum(tl.load(q_offsets + s + 1), total_rows)
    return begin, tl.maximum(end - begin, 0)


@triton.jit
def key_places(sequences, s, PAGE: tl.constexpr):
    """Return the `KeyPlaces` of a sequence, or of several."""
    kv_lengths, kv_offsets, table = sequences[3], sequences[5], sequences[6]
    most_keys, size = sequences[10], sequences[11]
    length = tl.minimum(tl.load(kv_lengths + s), most_keys)
    if PAGE == 0:
        first_row = tl.minimum(tl.maximum(tl.load(kv_offsets + s), 0), size)
        length = tl.minimum(length, size - first_row)
        line = table
    else:
        first_row = 0
        line = table + line_of_sequence(sequences, s) * sequences[12]
    return KeyPlaces(
        first_row=first_row, table=line, last_page=size - 1, length=tl.maximum(length, 0),
    )


@triton.jit
def unit_facts(sequences, s, total_rows, PAGE: tl.constexpr):
    """Return what a program must know of a sequence, or of several: first query row and number of
    rows, what mods see as b, what is added to rows for q_idx; first row in packed keys, line of
    the page table, number of keys."""
    first_row, rows = rows_of_sequence(sequences, s, total_rows)
    places = key_places(sequences, s, PAGE)
    line = 0 * s
    if PAGE > 0:
        line = line_of_sequence(sequences, s)
    mod_b, q_shift = tl.load(sequences[4] + s), tl.load(sequences[2] + s)
    return first_row, rows, mod_b, q_shift, 0 * s + places.first_row, line, places.length


@triton.jit
def page_at(places, key, PAGE: tl.constexpr):
    """Return the page of a key of `KeyPlaces`, inside of the pool."""
    found = tl.load(places.table + tl.minimum(key, places.length - 1) // PAGE)
    return tl.minimum(tl.maximum(found, 0), places.last_page)


@triton.jit
def steps_of_sequences(
    sequences, counts, s, total_rows, most_rows, LISTED: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the numbers of steps of several sequences' units.

    Args:
        counts: what `list_kernel` wrote, where LISTED.
        most_rows: maximum number of query rows of a sequence that is decoded.
    """
    if LISTED:
        return tl.load(counts + s)
    else:
        rows = rows_of_sequence(sequences, s, total_rows)[1]
        places = key_places(sequences, s, PAGE)
        steps = tl.maximum((places.length + BLOCK_N - 1) // BLOCK_N, 1)
        return tl.where((rows > 0) & (rows <= most_rows), steps, 0)


@triton.jit
def programs_and_groups(units, most, total, programs):
    """Return (number of programs that have a share, number of their groups), as
    `decode_steps.share_of` takes them.

    Args:
        units: number of units that have steps. most: largest number of a unit's steps. total:
            number of all steps.
        programs: number of programs there are.
    """
    live = tl.maximum(tl.minimum(programs, total // _LEAST_STEPS), 1)
    some = tl.maximum(units, 1)
    # Fewer shares cross the ends of equal units with a multiple or a divisor of their number.
    each = tl.maximum(live // some, 1)
    longest = tl.maximum((most + each - 1) // each, 1)
    rounds = (some + live - 1) // live
    found = tl.where(
        some <= live, (most + longest - 1) // longest * some, (some + rounds - 1) // rounds,
    )
    found = tl.maximum(found, 1)
    aligned = (most * units == total) & ((found % some == 0) | (some % found == 0))
    # Nearly as many programs are enough, as in `decode_call`.
    aligned = aligned & (found * 16 >= live * 15)
    return tl.where(aligned, found, live), tl.where(aligned, tl.minimum(found, some), 1)


@triton.jit
def share_of_live(program, live, total, groups):
    """Return the `share_of` a program, empty for those that have none."""
    first, end = share_of(tl.minimum(program, live - 1), live, total, groups)
    return first, tl.where(program < live, end, first)


@triton.jit
def shares_place(count):
    """Return the offset of the shares, behind edges and COUNTS."""
    return count + 1 + COUNTS


@triton.jit
def lists_place(count, programs):
    """Return the offset of what `list_kernel` writes, behind the shares."""
    return shares_place(count) + programs * SHARE_WORDS


@triton.jit
def share_kernel(
    sequences, edges, q_length, most_rows, kv_heads, programs, LISTED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Kernel of one program that cuts the steps of packed sequences into shares.

    Args:
        edges: int32. From the first on, numbers of steps of all earlier sequences [N + 1]; then
            COUNTS; from `shares_place` on shares [programs, SHARE_WORDS]; from `lists_place` on
            what `list_kernel` wrote before, where LISTED.
        most_rows: as in `steps_of_sequences`.
        programs: number of the main kernel's programs.
    """
    count = sequences[8]
    counts = edges + lists_place(count, programs)
    lanes = tl.arange(0, _LANES)
    before = 0
    units = 0
    most = 0
    tl.store(edges, 0)
    for first in range(0, count, _LANES):
        s = first + lanes
        steps = steps_of_sequences(
            sequences, counts, tl.minimum(s, count - 1), q_length, most_rows, LISTED, PAGE,
            BLOCK_N,
        )
        steps = tl.where(s < count, steps, 0)
        tl.store(edges + 1 + s, before + tl.cumsum(steps, 0), mask=s < count)
        before += tl.sum(steps, 0)
        units += tl.sum((steps > 0).to(tl.int32), 0)
        most = tl.maximum(most, tl.max(steps, 0))
    total = before * kv_heads
    live, groups = programs_and_groups(units * kv_heads, most, total, programs)
    tl.store(edges + count + 1, live)
    tl.store(edges + count + 2, groups)
    # The search reads edges that other threads have stored.
    tl.debug_barrier()
    shares = edges + shares_place(count)
    for first in range(0, programs, _LANES):
        program = first + lanes
        at, end = share_of_live(program, live, total, groups)
        low = lanes * 0
        high = low + count
        left = count
        while left > 0:
            middle = (low + high) // 2
            there = low < high
            ends = tl.load(edges + 1 + middle, mask=there, other=0)
            passed = there & (ends * kv_heads <= at)
            high = tl.where(there & (passed == 0), middle, high)
            low = tl.where(passed, middle + 1, low)
            left = left // 2
        place = shares + program * SHARE_WORDS
        there = program < programs
        s = tl.minimum(low, count - 1)
        earlier = tl.load(edges + s)
        tl.store(place, at, mask=there)
        tl.store(place + 1, end, mask=there)
        tl.store(place + 2, s, mask=there)
        tl.store(place + 3, earlier, mask=there)
        tl.store(place + 4, tl.load(edges + s + 1) - earlier, mask=there)
        facts = unit_facts(sequences, s, q_length, PAGE)
        for i in tl.static_range(7):
            tl.store(place + SHARE_FACTS + i, facts[i], mask=there)


@triton.jit
def list_kernel(
    offsets, ends, runs, mask_strides, sequences, edges, q_length, tiles, most_rows, most,
    programs, PAGE: tl.constexpr, KV_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Kernel that lists the steps of packed sequences under a mask, one program per sequence.

    Args:
        offsets, ends, runs, mask_strides: as in `anyflex_triton.forward`; rows of blocks are those
            of sequences, one after the other.
        edges: int32; from `lists_place` on: number of steps of each sequence, then steps [N, most,
            2] as `decode_steps.steps_kernel` writes them.
        tiles: number of rows of blocks.
        most_rows: as in `steps_of_sequences`. programs: as in `share_kernel`.
    """
    s = tl.program_id(0)
    count = sequences[8]
    counts = edges + lists_place(count, programs)
    rows = rows_of_sequence(sequences, s, q_length)[1]
    if (rows == 0) | (rows > most_rows):
        tl.store(counts + s, 0)
        return
    # The sequence's first row of blocks is looked up, so that no number on the device leads behind
    # the mask's last one.
    blocks, lanes, row = sequences[0], tl.arange(0, 256), -1
    for first in range(0, tiles, 256):
        at = first + lanes
        owner = tl.load(blocks + at * 2, mask=at < tiles, other=-1)
        number = tl.load(blocks + at * 2 + 1, mask=at < tiles, other=-1)
        row = tl.maximum(row, tl.max(tl.where((owner == s) & (number == 0), at, -1), 0))
    run, last_run = 0, 0
    if row >= 0:
        run, last_run = mask_row(offsets, ends, mask_strides, 0, 0, row)
    length = key_places(sequences, s, PAGE).length
    base = counts + count + s.to(tl.int64) * most * 2
    done = list_runs(runs, run, last_run, length, base, KV_BLOCK, BLOCK_N)
    if done == 0:
        tl.store(base, 0)
        tl.store(base + 1, 0)
    tl.store(counts + s, tl.maximum(done, 1))
