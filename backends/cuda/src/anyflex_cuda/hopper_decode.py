"""Attention for a few query rows on Hopper: programs that stream keys and values without pauses.

A program has a share of all steps, whatever units they belong to (decode_steps.py). It consists of
a producer warp and a consumer warpgroup. The producer has TMA load the share's keys and values
into a ring, as far ahead as the ring has slots, also across the ends of units. A unit's query rows
are padded with zeros to the 64 rows of a warpgroup's product. At the end of a unit's part of the
share its sums are written, and the last of the unit's programs adds them up (decode_parts.py).
Where that is too much work for one program, `decode_sums.combine_kernel` does it afterwards.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anyflex_cuda.decode_parts import (
    UnitOutputs,
    add_parts,
    begin_count,
    counted,
    rows_of_unit,
    write_dead,
    write_rows,
)
from anyflex_cuda.decode_steps import (
    ALL,
    EACH,
    NONE,
    counts_floats,
    program_of,
    share_of,
    steps_of_unit,
    steps_place,
    sums_place,
    total_steps,
)
from anyflex_cuda.nonfinite_rows import (
    KEYS,
    PART,
    PointedRows,
    load_part,
    place_of,
    seen_nonfinite,
)
from anyflex_cuda.smem_mailbox import said, say
from anyflex_cuda.split_tiles import ROWS, load_box
from anyflex_triton.device_functions import (
    Mods,
    RowResults,
    masked_scores,
    nonfinite,
    record,
    unit_of_scores,
)

__all__ = ["decode_kernel"]

# Triton 3.7 adds `thread_barrier`.
_all_threads = getattr(gl, "thread_barrier", None) or gl.barrier


@record
class StepPlan:
    """The call's steps: arguments of `decode_kernel`.

    Attributes:
        steps: the mask's steps, stored behind `edges`: see `decode_steps.steps_kernel`.
    """

    edges: Any
    steps: Any
    batch: Any
    kv_heads: Any
    kv_length: Any
    unit_steps: Any
    most: Any
    groups: Any
    PLAN: Any
    BLOCK_N: Any


@record
class DecodeRing:
    """Keys and values of STAGES steps in shared memory, the mailbox words about the steps, and
    barriers.

    Attributes:
        k_full, v_full: barriers; a slot is loaded. empty: nobody reads it any more.
    """

    k_bufs: Any
    v_bufs: Any
    k_full: Any
    v_full: Any
    empty: Any
    words: Any
    STAGES: Any


@record
class DecodeLoads:
    """Descriptors of keys and values: arguments of `decode_kernel`."""

    k_desc: Any
    v_desc: Any
    KV_SHARED: Any
    D: Any
    DV: Any


@record
class DecodeTensors:
    """Tensors by pointers: arguments of `decode_kernel`."""

    query: Any
    key: Any
    value: Any
    partial_out: Any
    q_strides: Any
    k_strides: Any
    v_strides: Any
    GROUP: Any
    KV_SHARED: Any
    DIM: Any
    VALUE_DIM: Any
    D: Any
    DV: Any


@record
class DecodeCall:
    """Arguments of the consumer.

    Attributes:
        partial_sums: stored behind partial_out: see `decode_kernel`.
        results: `anyflex_triton.kernel_records.RowResults`.
        mods: `anyflex_triton.kernel_records.Mods`.
        The others are arguments of `decode_kernel`.
    """

    q_buf: Any
    ring: Any
    tensors: Any
    partial_sums: Any
    counts: Any
    out: Any
    rest: Any
    results: Any
    o_strides: Any
    plan: Any
    tables: Any
    mods: Any
    mark: Any
    q_length: Any
    UNIT: Any
    ADDS: Any
    WANT_REST: Any


@record
class UnitPart:
    """The part of a unit that is in a program's share.

    Attributes:
        first_step: number of the part's first step within the unit. steps: number of the part's
            steps.
    """

    b: Any
    kv_head: Any
    first_step: Any
    steps: Any


@record
class PartSums:
    """Softmax statistics of [ROWS] rows after a part's steps: the largest score, the sum of
    weights relative to it, whether a score is NaN."""

    row_max: Any
    row_sum: Any
    nans: Any


# Argument lists would be a line an argument.
# fmt: off

WORDS = gl.constexpr(2)
"""Number of mailbox words per step, as `decode_steps.steps_kernel` writes them."""


# Shared by producer and consumer

@gluon.jit
def steps_of_all(plan):
    """Return the number of steps of all units."""
    return total_steps(plan.edges, plan.batch, plan.kv_heads, plan.unit_steps, plan.PLAN)


@gluon.jit
def unit_at(at, plan, WARPS: gl.constexpr):
    """Return (batch entry, KV head, step within the unit, number of the unit's steps) of step `at`
    of all steps.

    Args:
        WARPS: number of the caller's warps.
    """
    if plan.PLAN == EACH:
        LANES: gl.constexpr = 32 * WARPS
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        b = gl.to_tensor(0)
        for first in range(0, plan.batch, LANES):
            entry = first + gl.arange(0, LANES, layout=LAYOUT)
            ends = gl.load(plan.edges + entry + 1, mask=entry < plan.batch, other=0)
            over = (entry < plan.batch) & (ends * plan.kv_heads <= at)
            b += gl.sum(over.to(gl.int32), 0)
        before = gl.load(plan.edges + b)
        count = gl.load(plan.edges + b + 1) - before
        rest = at - before * plan.kv_heads
    else:
        count = plan.unit_steps
        if plan.PLAN == ALL:
            count = gl.load(plan.edges + 1)
        b = at // (count * plan.kv_heads)
        rest = at - b * (count * plan.kv_heads)
    return b, rest // count, rest % count, count


@gluon.jit
def step_of(plan, b, i):
    """Return (first key, twice the number of keys, plus 1 where no mask mod is evaluated) of a
    unit's step i."""
    if plan.PLAN == NONE:
        first = i * plan.BLOCK_N
        return first, gl.minimum(plan.kv_length - first, plan.BLOCK_N) * 2 + 1
    else:
        row = b if plan.PLAN == EACH else 0 * b
        at = plan.steps + (gl.cast(row, gl.int64) * plan.most + i) * WORDS
        return gl.load(at), gl.load(at + 1)


# The producer

@gluon.jit
def load_step(loads, ring, slot, b, kv_head, first, BLOCK_N: gl.constexpr):
    kv_b = 0 * b if loads.KV_SHARED else b
    at = [kv_b, kv_head, first, 0]
    mbarrier.expect(ring.k_full.index(slot), BLOCK_N * loads.D * 2)
    load_box(loads.k_desc, at, ring.k_full.index(slot), ring.k_bufs.index(slot))
    mbarrier.expect(ring.v_full.index(slot), BLOCK_N * loads.DV * 2)
    load_box(loads.v_desc, at, ring.v_full.index(slot), ring.v_bufs.index(slot))


@gluon.jit
def produce(loads, ring, plan, ahead):
    """Load the steps of this program's share.

    Args:
        ahead: number of steps of its first unit that are in flight already.
    """
    PLAN: gl.constexpr = plan.PLAN
    total = steps_of_all(plan)
    at, end = share_of(gl.program_id(0), gl.num_programs(0), total, plan.groups)
    step = gl.to_tensor(0)
    while at < end:
        b, kv_head, i, count = unit_at(at, plan, 1)
        part = gl.minimum(end - at, count - i)
        begin = i
        if PLAN == NONE and step == 0:
            begin += ahead
            step += ahead
        for j in range(begin, i + part):
            slot = step % ring.STAGES
            first, kind = step_of(plan, b, j)
            mbarrier.wait(ring.empty.index(slot), ((step // ring.STAGES) & 1) ^ 1)
            if PLAN != NONE:
                say(ring.words, slot * WORDS, first)
                say(ring.words, slot * WORDS + 1, kind)
            load_step(loads, ring, slot, b, kv_head, first, plan.BLOCK_N)
            step += 1
        at += part


# The consumer

@gluon.jit
def query_columns(
    call, b, kv_head, first_column, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr,
):
    """Return [ROWS, COLUMNS] of a unit's query rows; 0 in other rows, and from column DIM on."""
    tensors = call.tensors
    strides = tensors.q_strides
    packed = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    inside, head, row = rows_of_unit(packed, kv_head, call.q_length, tensors.GROUP)
    # Offsets are counted in units of one load.
    of_rows = (
        gl.cast(b, gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
        + row.to(gl.int64) * strides[2]
    ) * 8
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    columns = gl.expand_dims(first_column + columns, 0)
    there = gl.expand_dims(inside, 1) & (columns < tensors.DIM)
    return gl.load(tensors.query + gl.expand_dims(of_rows, 1) + columns, mask=there, other=0.0)


@gluon.jit
def load_queries(call, b, kv_head):
    """Load a unit's query rows as an operand of warpgroup products."""
    D: gl.constexpr = call.tensors.D
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    call.q_buf.store(query_columns(call, b, kv_head, 0, D, LAYOUT))
    fence_async_shared()
    # One barrier here replaces one in each step.
    _all_threads()


@gluon.jit
def write_nonfinite_part(row_max, call, part, place):
    """Compute the sums of a part with non-finite values again: see nonfinite_rows.py.

    Args:
        row_max: [ROWS] float32, the largest score of each row.
        part: `UnitPart`.
        place: offset of the part's rows in partial_out.
    """
    tensors = call.tensors
    mods = call.mods
    plan = call.plan
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8],
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    packed = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    inside, head, row = rows_of_unit(packed, part.kv_head, call.q_length, tensors.GROUP)
    inside = gl.expand_dims(inside, 1)
    q_idx = gl.expand_dims(row, 1) + mods.shifts[2]
    mod_h = gl.expand_dims(head, 1) + mods.shifts[1]
    mod_b = part.b + mods.shifts[0]
    kv_b = 0 * part.b if tensors.KV_SHARED else part.b
    pointed_keys = PointedRows(
        base=tensors.key + place_of(tensors.k_strides, kv_b, part.kv_head),
        stride=tensors.k_strides[2], DIM=tensors.DIM,
    )
    pointed_values = PointedRows(
        base=tensors.value + place_of(tensors.v_strides, kv_b, part.kv_head),
        stride=tensors.v_strides[2], DIM=tensors.VALUE_DIM,
    )
    shift = gl.where(row_max == float("-inf"), 0.0, row_max)
    shift = gl.expand_dims(gl.convert_layout(shift, gl.SliceLayout(1, LAYOUT)), 1)
    unit = unit_of_scores(mods.scale, mods.SCORE_MOD)
    rows = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    for first_column in range(0, tensors.VALUE_DIM, PART):
        acc = gl.full([ROWS, PART], 0.0, gl.float32, layout=LAYOUT)
        for j in range(part.first_step, part.first_step + part.steps):
            begin, kind = step_of(plan, part.b, j)
            end = begin + kind // 2
            for first in range(begin, end, KEYS):
                scores = gl.full([ROWS, KEYS], 0.0, gl.float32, layout=LAYOUT)
                for d in range(0, tensors.DIM, PART):
                    q = query_columns(call, part.b, part.kv_head, d, PART, LEFT)
                    k = load_part(pointed_keys, first, end, d, KEYS, RIGHT, True)
                    scores = mma_v2(q, k, scores)
                keys = first + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
                keys = gl.expand_dims(keys, 0)
                kv_idx = gl.minimum(keys, plan.kv_length - 1) + mods.shifts[3]
                if mods.SCORE_MOD is not None:
                    scores = mods.SCORE_MOD(
                        scores * mods.scale, mod_b, mod_h, q_idx, kv_idx, call.tables, mods.ints,
                        mods.floats,
                    )
                scores = masked_scores(
                    scores, True, keys < end, kind % 2 != 0, mod_b, mod_h, q_idx, kv_idx,
                    call.tables, mods.ints, mods.floats, mods.MASK_MOD,
                )
                exponent = (scores - shift) * unit
                # Products summed in another order may exceed row_max slightly.
                weights = gl.exp2(gl.where(exponent > 0.0, 0.0, exponent))
                v = load_part(pointed_values, first, end, first_column, KEYS, RIGHT, False)
                finite = gl.where(nonfinite(v), 0.0, v.to(gl.float32)).to(v.dtype)
                acc = mma_v2(gl.convert_layout(weights.to(v.dtype), LEFT), finite, acc)
                acc += seen_nonfinite(scores != float("-inf"), v, LAYOUT, ROWS)
        columns = gl.arange(0, PART, layout=gl.SliceLayout(0, LAYOUT))
        columns = gl.expand_dims(first_column + columns, 0)
        at = tensors.partial_out + (place + rows) * tensors.VALUE_DIM + columns
        gl.store(at, acc, mask=inside & (columns < tensors.VALUE_DIM))


@gluon.jit
def write_part(
    acc, sums, is_nonfinite, call, part, OF_ROWS: gl.constexpr, O_LAYOUT: gl.constexpr,
):
    """Write the sums of a part of a unit. Each pair of unit and program has its own place.

    Args:
        acc: [ROWS, DV], in O_LAYOUT. sums: `PartSums`, in OF_ROWS.
        is_nonfinite: whether acc is non-finite and has to be computed without 0 * NaN.
    """
    VALUE_DIM: gl.constexpr = call.tensors.VALUE_DIM
    unit = part.b * call.plan.kv_heads + part.kv_head
    rows_a_unit = call.tensors.GROUP * call.q_length
    place = gl.cast(gl.program_id(0) + unit, gl.int64) * rows_a_unit
    packed = gl.arange(0, ROWS, layout=OF_ROWS)
    inside = packed < rows_a_unit
    at = call.partial_sums + (place + packed) * 3
    gl.store(at, sums.row_max, mask=inside)
    gl.store(at + 1, sums.row_sum, mask=inside)
    if call.results.WANT_MAX:
        gl.store(at + 2, sums.nans.to(gl.float32), mask=inside)
    if is_nonfinite:
        write_nonfinite_part(sums.row_max, call, part, place)
    else:
        rows = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_LAYOUT)), 1)
        columns = gl.arange(0, call.tensors.DV, layout=gl.SliceLayout(0, O_LAYOUT))
        columns = gl.expand_dims(columns, 0)
        there = (rows < rows_a_unit) & (columns < VALUE_DIM)
        out = call.tensors.partial_out + (place + rows) * VALUE_DIM + columns
        gl.store(out, acc, mask=there)


@gluon.jit
def consume(call):
    """Take the steps of this program's share, and write rows or sums of parts.

    Args:
        call: `DecodeCall`.
    """
    ring = call.ring
    plan = call.plan
    tensors = call.tensors
    mods = call.mods
    scale = mods.scale
    q_length = call.q_length
    PLAN: gl.constexpr = plan.PLAN
    BLOCK_N: gl.constexpr = plan.BLOCK_N
    DV: gl.constexpr = tensors.DV
    VALUE_DIM: gl.constexpr = tensors.VALUE_DIM
    SCORE_MOD: gl.constexpr = mods.SCORE_MOD
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16],
    )
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16],
    )
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    OF_OUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    outputs = UnitOutputs(
        out=call.out, rest=call.rest, o_strides=call.o_strides, results=call.results, scale=scale,
        kv_heads=plan.kv_heads, q_length=q_length, GROUP=tensors.GROUP, VALUE_DIM=VALUE_DIM, DV=DV,
        UNIT=call.UNIT, WANT_REST=call.WANT_REST,
    )
    unit = unit_of_scores(scale, SCORE_MOD)
    programs = gl.num_programs(0)
    total_count = steps_of_all(plan)
    at, last = share_of(gl.program_id(0), programs, total_count, plan.groups)
    if call.ADDS and PLAN != NONE:
        # Units without steps are in no program's share. Writing their rows here costs nothing
        # while the first keys are in flight.
        for u in range(gl.program_id(0), plan.batch * plan.kv_heads, programs):
            b = u // plan.kv_heads
            _, count = steps_of_unit(
                plan.edges, b, u % plan.kv_heads, plan.kv_heads, plan.unit_steps, PLAN,
            )
            if count == 0:
                write_dead(outputs, b, u % plan.kv_heads)
    step = gl.to_tensor(0)
    while at < last:
        b, kv_head, i, count = unit_at(at, plan, 4)
        part = gl.minimum(last - at, count - i)
        u = b * plan.kv_heads + kv_head
        if call.ADDS:
            found = gl.load(call.counts + u, volatile=True)
        load_queries(call, b, kv_head)
        if call.ADDS:
            begin_count(call.counts + u, found, call.mark)
        packed = gl.arange(0, ROWS, layout=OF_ROWS)
        _, head, row = rows_of_unit(packed, kv_head, q_length, tensors.GROUP)
        mod_b = b + mods.shifts[0]
        mod_h = gl.expand_dims(head, 1) + mods.shifts[1]
        q_idx = gl.expand_dims(row, 1) + mods.shifts[2]
        row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=OF_ROWS)
        row_sum = gl.full([ROWS], 0.0, gl.float32, layout=OF_ROWS)
        nans = gl.full([ROWS], 0, gl.int32, layout=OF_ROWS)
        acc = gl.full([ROWS, DV], 0.0, gl.float32, layout=O_LAYOUT)
        for j in range(i, i + part):
            slot = step % ring.STAGES
            phase = (step // ring.STAGES) & 1
            mbarrier.wait(ring.k_full.index(slot), phase)
            if PLAN == NONE:
                first, kind = step_of(plan, b, j)
            else:
                first = said(ring.words, slot * WORDS)
                kind = said(ring.words, slot * WORDS + 1)
            zeros = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=S_LAYOUT)
            k = ring.k_bufs.index(slot).reshape([BLOCK_N, tensors.D]).permute((1, 0))
            raw = warpgroup_mma(call.q_buf, k, zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(num_outstanding=0, deps=(raw,))
            keys = gl.expand_dims(
                first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT)), 0,
            )
            kv_idx = gl.minimum(keys, plan.kv_length - 1) + mods.shifts[3]
            if SCORE_MOD is not None:
                scores = SCORE_MOD(
                    scores * scale, mod_b, mod_h, q_idx, kv_idx, call.tables, mods.ints,
                    mods.floats,
                )
            if kind != BLOCK_N * 2 + 1:
                scores = masked_scores(
                    scores, True, keys < first + kind // 2, kind % 2 != 0, mod_b, mod_h, q_idx,
                    kv_idx, call.tables, mods.ints, mods.floats, mods.MASK_MOD,
                )
            if call.results.WANT_MAX:
                nans = gl.maximum(nans, gl.max((scores != scores).to(gl.int32), 1))
            new_max = gl.maximum(row_max, gl.max(scores, 1))
            # The shift is subtracted before scaling, because it may be huge. Latency of keys hides
            # the cost.
            shift = gl.where(new_max == float("-inf"), 0.0, new_max)
            weights = gl.exp2((scores - gl.expand_dims(shift, 1)) * unit)
            alpha = gl.exp2((row_max - shift) * unit)
            row_sum = row_sum * alpha + gl.sum(weights, 1)
            row_max = new_max
            acc = acc * gl.expand_dims(gl.convert_layout(alpha, OF_OUT), 1)
            halves = gl.convert_layout(
                weights.to(ring.v_bufs.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2),
            )
            mbarrier.wait(ring.v_full.index(slot), phase)
            v = ring.v_bufs.index(slot).reshape([BLOCK_N, DV])
            acc_later = warpgroup_mma(halves, v, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_later,))
            mbarrier.arrive(ring.empty.index(slot), count=1)
            step += 1
        rows_a_unit = tensors.GROUP * q_length
        rows = gl.expand_dims(gl.arange(0, ROWS, layout=OF_OUT), 1)
        # Non-finite values also reach rows that don't see them: 0 * NaN is NaN.
        zeros = gl.sum(gl.where(rows < rows_a_unit, acc * 0.0, 0.0), 1)
        is_nonfinite = gl.max((zeros != zeros).to(gl.int32), 0) > 0
        sums = PartSums(row_max=row_max, row_sum=row_sum, nans=nans)
        unit_part = UnitPart(b=b, kv_head=kv_head, first_step=i, steps=part)
        if call.ADDS:
            if is_nonfinite | (part < count):
                write_part(acc, sums, is_nonfinite, call, unit_part, OF_ROWS, O_LAYOUT)
                first_program = program_of(at - i, programs, total_count, plan.groups)
                last_program = program_of(at - i + count - 1, programs, total_count, plan.groups)
                # One thread counts, with release semantics for the stores of all.
                _all_threads()
                if counted(call.counts + u, call.mark) == last_program - first_program:
                    place = gl.cast(first_program + u, gl.int64) * rows_a_unit
                    add_parts(
                        tensors.partial_out + place * VALUE_DIM, call.partial_sums + place * 3,
                        last_program - first_program + 1, outputs, b, kv_head,
                    )
                    gl.store(call.counts + u, 0)
            else:
                write_rows(
                    acc, gl.convert_layout(row_max, OF_OUT), gl.convert_layout(row_sum, OF_OUT),
                    gl.convert_layout(nans, OF_OUT), 0, outputs, b, kv_head, ROWS, O_LAYOUT,
                )
                # This unit isn't counted. But a stale mark whose lowest bytes alone are
                # overwritten would count in a later launch.
                gl.store(call.counts + u, 0)
        else:
            write_part(acc, sums, is_nonfinite, call, unit_part, OF_ROWS, O_LAYOUT)
        at += part


@gluon.jit
def decode_kernel(
    k_desc, v_desc, query, key, value, partial_out, counts, out, rest, tops, lse, max_scores,
    q_strides, k_strides, v_strides, o_strides, edges, tables, ints, floats, shifts, scale, mark,
    batch, kv_heads, q_length, kv_length, unit_steps, most, groups, SCORE_MOD: gl.constexpr,
    MASK_MOD: gl.constexpr, PLAN: gl.constexpr, GROUP: gl.constexpr, KV_SHARED: gl.constexpr,
    DIM: gl.constexpr, VALUE_DIM: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    UNIT: gl.constexpr, ADDS: gl.constexpr, WANT_LSE: gl.constexpr, WANT_MAX: gl.constexpr,
    WANT_REST: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """Decoding kernel: each unit's rows, or, without ADDS, the sums of each part.

    Args:
        k_desc, v_desc: descriptors [B, Hkv, S, dims] of key and value; boxes of BLOCK_N rows, D or
            DV columns.
        query: pointer, with strides (b, h, row) in units of 8 elements.
        key, value: pointers for `write_nonfinite_part`, with strides (b, h, row).
        partial_out: from `decode_steps.counts_floats` on [programs + units, GROUP * L, VALUE_DIM],
            float32: the part of program p and unit u is at p + u, relative to its own row_max.
            Behind it, from `decode_steps.sums_place` on, partial_sums: [programs + units, GROUP *
            L, 3], float32: row_max, row_sum, and where WANT_MAX 1 if a score is NaN.
        counts: int64 [units] at the begin of partial_out, uninitialized: number of a unit's parts
            that are written, see `decode_parts.begin_count`. One tensor less to allocate saves the
            host two microseconds.
        out, rest, tops, lse, max_scores, o_strides: as in `decode_sums.combine_kernel`; used with
            ADDS, where parts are added up here.
    """
    units = batch * kv_heads
    partial_out += counts_floats(units)
    partial_sums = partial_out + sums_place(
        gl.num_programs(0), units, GROUP * q_length, VALUE_DIM,
    )
    steps = edges + steps_place(batch if PLAN == EACH else 1)
    ONE_ROW: gl.constexpr = mbarrier.MBarrierLayout()
    WORD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], k_desc.dtype)
    q_buf = gl.allocate_shared_memory(k_desc.dtype, [ROWS, D], Q_LAYOUT)
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, DV], v_desc.layout)
    words = gl.allocate_shared_memory(gl.int32, [STAGES * WORDS, 1], WORD)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    plan = StepPlan(
        edges=edges, steps=steps, batch=batch, kv_heads=kv_heads, kv_length=kv_length,
        unit_steps=unit_steps, most=most, groups=groups, PLAN=PLAN, BLOCK_N=BLOCK_N,
    )
    ring = DecodeRing(
        k_bufs=k_bufs, v_bufs=v_bufs, k_full=k_full, v_full=v_full, empty=empty, words=words,
        STAGES=STAGES,
    )
    loads = DecodeLoads(k_desc=k_desc, v_desc=v_desc, KV_SHARED=KV_SHARED, D=D, DV=DV)
    call = DecodeCall(
        q_buf=q_buf, ring=ring,
        tensors=DecodeTensors(
            query=query, key=key, value=value, partial_out=partial_out, q_strides=q_strides,
            k_strides=k_strides, v_strides=v_strides, GROUP=GROUP, KV_SHARED=KV_SHARED, DIM=DIM,
            VALUE_DIM=VALUE_DIM, D=D, DV=DV,
        ),
        partial_sums=partial_sums, counts=counts, out=out, rest=rest,
        results=RowResults(
            tops=tops, lse=lse, max_scores=max_scores, SCORED=SCORE_MOD is not None,
            WANT_LSE=WANT_LSE, WANT_MAX=WANT_MAX, WANT_TOPS=WANT_REST,
        ),
        o_strides=o_strides, plan=plan, tables=tables,
        mods=Mods(
            ints=ints, floats=floats, shifts=shifts, scale=scale, READ=None, SCORE_MOD=SCORE_MOD,
            MASK_MOD=MASK_MOD,
        ),
        mark=mark, q_length=q_length, UNIT=UNIT, ADDS=ADDS, WANT_REST=WANT_REST,
    )
    ahead = gl.to_tensor(0)
    if PLAN == NONE:
        # The first loads depend on nothing in shared memory, so they are issued before the warps
        # get their roles.
        total = steps_of_all(plan)
        at, end = share_of(gl.program_id(0), gl.num_programs(0), total, groups)
        b, kv_head, i, count = unit_at(at, plan, 4)
        ahead = gl.minimum(gl.minimum(end - at, count - i), STAGES)
        for s in range(ahead):
            load_step(loads, ring, s, b, kv_head, (i + s) * BLOCK_N, BLOCK_N)
    gl.warp_specialize([
        (consume, (call,)),
        (produce, (loads, ring, plan, ahead)),
    ], [1], [PRODUCER_REGISTERS])
