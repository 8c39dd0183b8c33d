"""Work split of Hopper's decoding: steps of BLOCK_N keys, shared out among programs.

A unit is a KV head of a batch entry; its query rows are one tile. The units' steps are
concatenated and cut into equal shares, one for each program, whatever units they belong to
(stream-K: Osama et al., 2023). Where the numbers of units and programs have a common divisor, that
many groups of units have programs of their own, so that fewer shares cross the ends of units. A
unit's result combines the sums of all programs that had a part of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anyflex_triton.device_functions import FULL, mask_row

__all__ = [
    "ALL",
    "EACH",
    "NONE",
    "counts_floats",
    "list_runs",
    "part_place",
    "program_of",
    "share_of",
    "steps_kernel",
    "steps_of_unit",
    "steps_place",
    "sums_place",
    "total_steps",
]

# Argument lists would be a line an argument.
# fmt: off

NONE = tl.constexpr(0)
"""Plan without a block mask: a unit's steps cover all keys."""
ALL = tl.constexpr(1)
"""Plan where all batch entries share a row of runs."""
EACH = tl.constexpr(2)
"""Plan where each batch entry has its own row of runs."""


@triton.jit
def share_of(program, programs, total, groups):
    """Return (first step, end) of a program's share of `total` steps. Shares differ by one step at
    most; a group's first ones are the longer ones.

    Args:
        groups: number of equal groups that programs and steps are cut into first; a divisor of
            both.
    """
    members = programs // groups
    steps = total // groups
    least = steps // members
    more = steps % members
    member = program % members
    first = program // members * steps + member * least + tl.minimum(member, more)
    return first, first + least + tl.where(member < more, 1, 0)


@triton.jit
def program_of(step, programs, total, groups):
    """Return the program whose share a step is in."""
    members = programs // groups
    # Callers whose units have no steps call this too.
    steps = tl.maximum(total // groups, 1)
    least = steps // members
    more = steps % members
    first = step // steps * members
    step = step % steps
    # Where shares have at most one step, all steps are in the longer ones.
    rest = (step - more * (least + 1)) // tl.maximum(least, 1)
    return first + tl.where(step < more * (least + 1), step // (least + 1), more + rest)


@triton.jit
def total_steps(edges, batch, kv_heads, unit_steps, PLAN: tl.constexpr):
    """Return the number of steps of all units.

    Args:
        edges: written by `steps_kernel`, if PLAN isn't NONE.
        unit_steps: number of a unit's steps, if PLAN is NONE.
    """
    if PLAN == NONE:
        return batch * kv_heads * unit_steps
    elif PLAN == ALL:
        return batch * kv_heads * tl.load(edges + 1)
    else:
        return tl.load(edges + batch) * kv_heads


@triton.jit
def steps_of_unit(edges, b, kv_head, kv_heads, unit_steps, PLAN: tl.constexpr):
    """Return (first step, number of steps) of a unit. Arguments are as in `total_steps`."""
    if PLAN == EACH:
        before = tl.load(edges + b)
        count = tl.load(edges + b + 1) - before
        return before * kv_heads + kv_head * count, count
    else:
        count = unit_steps
        if PLAN == ALL:
            count = tl.load(edges + 1)
        return (b * kv_heads + kv_head) * count, count


@triton.jit
def counts_floats(units):
    """Return the size of `hopper_decode.decode_kernel`'s counts, which begin its workspace, in
    float32 elements: what follows is aligned to 16 bytes."""
    return (units + 1) // 2 * 4


@triton.jit
def part_place(first_program, part):
    """Return the place of a unit's part: a program has one for the part that its share begins
    with, if that isn't a unit's first, and then one for a unit's first part.

    Args:
        first_program: the one that has the unit's first part.
        part: number of the part, counted in programs; may be a tensor.
    """
    return first_program * 2 + 1 + tl.maximum(part * 2 - 1, 0)


@triton.jit
def sums_place(programs, rows, VALUE_DIM: tl.constexpr):
    """Return the offset of the sums of parts, which follow their values.

    Args:
        rows: number of a part's rows.
    """
    return tl.cast(programs * 2, tl.int64) * (rows * VALUE_DIM)


@triton.jit
def steps_place(entries):
    """Return the offset of a mask's steps, which follow the edges of its entries."""
    return entries + 1


@triton.jit
def keys_of(runs, run, there, kv_length, KV_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (begin, end, 1 if FULL, number of steps) of runs; the last is 0 where a run isn't
    `there`."""
    begin = tl.load(runs + run * 3, mask=there, other=0) * KV_BLOCK
    end = tl.minimum(tl.load(runs + run * 3 + 1, mask=there, other=0) * KV_BLOCK, kv_length)
    full = (tl.load(runs + run * 3 + 2, mask=there, other=0) == FULL).to(tl.int32)
    return begin, end, full, (tl.maximum(end - begin, 0) + BLOCK_N - 1) // BLOCK_N


@triton.jit
def list_runs(
    runs, run, last_run, length, base, KV_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Write the steps of runs, for each its first key, and twice its number of keys, plus 1 in a
    FULL run. Return how many there are.

    Args:
        run, last_run: numbers of the first run and of the end.
        length: number of keys, where runs are cut.
        base: pointer to the first step.
    """
    lanes = tl.arange(0, 32)
    done = 0
    for first_run in range(run, last_run, 32):
        index = first_run + lanes
        begin, end, full, count = keys_of(
            runs, index, index < last_run, length, KV_BLOCK, BLOCK_N
        )
        place = done + tl.cumsum(count, 0) - count
        for first in range(0, tl.max(count, 0), 32):
            step = first + lanes[None, :]
            key = begin[:, None] + step * BLOCK_N
            keys = tl.minimum(end[:, None] - key, BLOCK_N)
            at = base + (place[:, None] + step) * 2
            there = step < count[:, None]
            tl.store(at, key, mask=there)
            tl.store(at + 1, keys * 2 + full[:, None], mask=there)
        done += tl.sum(count, 0)
    return done


@triton.jit
def steps_kernel(
    offsets, ends, runs, mask_strides, edges, entries, most, kv_length,
    KV_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Kernel that lists a mask's steps: one program for each batch entry of the mask writes its
    steps, and a last program counts all.

    Args:
        offsets, ends, runs, mask_strides: as in `anyflex_triton.forward`; only the first row of
            blocks of the first head is read.
        edges: int32 [entries + 1], number of steps of all earlier batch entries. Behind it, from
            `steps_place` on, steps: [entries, most, 2], as `list_runs` writes them.
    """
    b = tl.program_id(0)
    steps = edges + steps_place(entries)
    lanes = tl.arange(0, 32)
    if b < entries:
        run, last_run = mask_row(offsets, ends, mask_strides, b, 0, 0)
        base = steps + b.to(tl.int64) * most * 2
        list_runs(runs, run, last_run, kv_length, base, KV_BLOCK, BLOCK_N)
    else:
        done = 0
        tl.store(edges, 0)
        for first in range(0, entries, 32):
            entry = first + lanes
            there = entry < entries
            run = tl.load(offsets + entry * mask_strides[0], mask=there, other=0)
            last_run = tl.load(ends + entry * mask_strides[0], mask=there, other=0)
            counts = tl.zeros([32], tl.int32)
            for first_run in range(0, tl.max(last_run - run, 0), 32):
                index = run[:, None] + first_run + lanes[None, :]
                _, _, _, count = keys_of(
                    runs, index, index < last_run[:, None], kv_length, KV_BLOCK, BLOCK_N
                )
                counts += tl.sum(count, 1)
            tl.store(edges + 1 + entry, done + tl.cumsum(counts, 0), mask=there)
            done += tl.sum(counts, 0)
