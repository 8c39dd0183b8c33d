"""What the programs of Hopper's decoding share out: steps of BLOCK_N keys.

A unit is a key head of a batch entry: its query rows are one tile. The units' steps, one after the
other, are cut into equal shares, one for each program (stream-K: Osama et al., 2023), whatever
units they belong to; where the numbers of units and programs have a common divisor, that many
groups of units have programs of their own, so that fewer shares cross the ends of units. A unit's
sums are then those of the programs that had a part of it.
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
"""No block mask: a unit's steps are those of all keys."""
ALL = tl.constexpr(1)
"""A row of runs for all batch entries."""
EACH = tl.constexpr(2)
"""One for each."""


@triton.jit
def share_of(program, programs, total, groups):
    """(first step, end) of a program's share of `total` steps: the first few of a group have one
    more.

    Args:
        groups: programs and steps are cut into so many groups first, each of the same size. A
            divisor of both.
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
    """Whose share a step is in."""
    members = programs // groups
    # Callers whose units have no steps ask too.
    steps = tl.maximum(total // groups, 1)
    least = steps // members
    more = steps % members
    first = step // steps * members
    step = step % steps
    # Where shares have a step at most, all steps are in longer ones.
    rest = (step - more * (least + 1)) // tl.maximum(least, 1)
    return first + tl.where(step < more * (least + 1), step // (least + 1), more + rest)


@triton.jit
def total_steps(edges, batch, kv_heads, unit_steps, PLAN: tl.constexpr):
    """Steps of all units.

    Args:
        edges: of `steps_kernel`, if PLAN isn't NONE.
        unit_steps: of a unit, if PLAN is NONE.
    """
    if PLAN == NONE:
        return batch * kv_heads * unit_steps
    elif PLAN == ALL:
        return batch * kv_heads * tl.load(edges + 1)
    else:
        return tl.load(edges + batch) * kv_heads


@triton.jit
def steps_of_unit(edges, b, kv_head, kv_heads, unit_steps, PLAN: tl.constexpr):
    """(first step, steps) of a unit; arguments as `total_steps`'s."""
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
    """Floats in whose place `hopper_decode.decode_kernel`'s counts are, at the begin of its
    workspace: what follows is aligned to 16 bytes."""
    return (units + 1) // 2 * 4


@triton.jit
def sums_place(programs, units, rows, VALUE_DIM: tl.constexpr):
    """Where the sums of parts begin: behind their values.

    Args:
        rows: of a unit.
    """
    return tl.cast(programs + units, tl.int64) * (rows * VALUE_DIM)


@triton.jit
def steps_place(entries):
    """Where the steps of a mask begin: behind the edges of its entries."""
    return entries + 1


@triton.jit
def keys_of(runs, run, there, kv_length, KV_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    """(begin, end, 1 if FULL, steps) of runs, whose steps are 0 where they aren't `there`."""
    begin = tl.load(runs + run * 3, mask=there, other=0) * KV_BLOCK
    end = tl.minimum(tl.load(runs + run * 3 + 1, mask=there, other=0) * KV_BLOCK, kv_length)
    full = (tl.load(runs + run * 3 + 2, mask=there, other=0) == FULL).to(tl.int32)
    return begin, end, full, (tl.maximum(end - begin, 0) + BLOCK_N - 1) // BLOCK_N


@triton.jit
def steps_kernel(
    offsets, ends, runs, mask_strides, edges, entries, most, kv_length,
    KV_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Programs one for each batch entry of the mask, which writes its steps, and a last one for
    all, which counts them.

    Args:
        offsets, ends, runs, mask_strides: as `anyflex_triton.forward`'s; the first row of blocks
            of the first head is read.
        edges: int32 [entries + 1], steps of the batch entries before. Behind it, `steps_place`,
            steps: [entries, most, 2], of each: its first key; twice its keys, plus 1 if they are a
            FULL run's.
    """
    b = tl.program_id(0)
    steps = edges + steps_place(entries)
    lanes = tl.arange(0, 32)
    if b < entries:
        run, last_run = mask_row(offsets, ends, mask_strides, b, 0, 0)
        base = steps + b.to(tl.int64) * most * 2
        done = 0
        for first_run in range(run, last_run, 32):
            index = first_run + lanes
            begin, end, full, count = keys_of(
                runs, index, index < last_run, kv_length, KV_BLOCK, BLOCK_N
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
