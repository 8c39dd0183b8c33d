"""Attention for a few query rows on Hopper: programs that stream keys and values without a pause.

A program has a share of all steps, whatever units they belong to (decode_steps.py), and is one
producer warp and one warpgroup that computes. The producer has TMA load the share's keys and
values into a ring, as far ahead as that has room, also across the ends of units. A unit's query
rows are the 64 rows of a product of warpgroups, and the rest of those are zeros. At the end of a
unit's part of the share its sums are written, and decode_parts.py has the last of its programs add
them up. Where that were too much for one program, `decode_sums.combine_kernel` does so after it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anyflex_cuda.decode_parts import (
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
from anyflex_cuda.spoken_words import said, say
from anyflex_cuda.strange_values import KEYS, PART, load_part, place_of, seen_strange
from anyflex_cuda.tile_parts import ROWS
from anyflex_triton.device_functions import masked_scores, strange, unit_of_scores

__all__ = ["decode_kernel"]

# Triton 3.8 has a new name for it.
_load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
# Triton 3.7 has one for it.
_all_threads = getattr(gl, "thread_barrier", None) or gl.barrier

# Argument lists would be a line an argument.
# fmt: off

WORDS = gl.constexpr(2)
"""What is said of a step: as `decode_steps.steps_kernel` writes it."""


# What producer and consumer agree on

@gluon.jit
def unit_at(
    at, edges, batch, kv_heads, unit_steps, PLAN: gl.constexpr, WARPS: gl.constexpr,
):
    """(batch entry, key head, step of that unit, its steps) of a step of all.

    Args:
        edges, unit_steps: as `decode_steps.total_steps`'s.
        WARPS: of who calls.
    """
    if PLAN == EACH:
        LANES: gl.constexpr = 32 * WARPS
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        b = gl.to_tensor(0)
        for first in range(0, batch, LANES):
            entry = first + gl.arange(0, LANES, layout=LAYOUT)
            ends = gl.load(edges + entry + 1, mask=entry < batch, other=0)
            over = (entry < batch) & (ends * kv_heads <= at)
            b += gl.sum(over.to(gl.int32), 0)
        before = gl.load(edges + b)
        count = gl.load(edges + b + 1) - before
        rest = at - before * kv_heads
    else:
        count = unit_steps
        if PLAN == ALL:
            count = gl.load(edges + 1)
        b = at // (count * kv_heads)
        rest = at - b * (count * kv_heads)
    return b, rest // count, rest % count, count


@gluon.jit
def step_of(steps, b, most, i, kv_length, PLAN: gl.constexpr, BLOCK_N: gl.constexpr):
    """(first key, twice the keys plus 1 where no mask mod is asked) of a unit's step i."""
    if PLAN == NONE:
        first = i * BLOCK_N
        return first, gl.minimum(kv_length - first, BLOCK_N) * 2 + 1
    else:
        row = b if PLAN == EACH else 0 * b
        at = steps + (gl.cast(row, gl.int64) * most + i) * WORDS
        return gl.load(at), gl.load(at + 1)


# The producer

@gluon.jit
def load_step(
    k_desc, v_desc, k_bufs, v_bufs, k_full, v_full, slot, b, kv_head, first,
    KV_SHARED: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, BLOCK_N: gl.constexpr,
):
    kv_b = 0 * b if KV_SHARED else b
    mbarrier.expect(k_full.index(slot), BLOCK_N * D * 2)
    _load_box(k_desc, [kv_b, kv_head, first, 0], k_full.index(slot), k_bufs.index(slot))
    mbarrier.expect(v_full.index(slot), BLOCK_N * DV * 2)
    _load_box(v_desc, [kv_b, kv_head, first, 0], v_full.index(slot), v_bufs.index(slot))


@gluon.jit
def produce(
    k_desc, v_desc, k_bufs, v_bufs, k_full, v_full, empty, words, edges, steps, ahead, batch,
    kv_heads, kv_length, unit_steps, most, groups, PLAN: gl.constexpr, KV_SHARED: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):
    """Args:
        ahead: steps of its first unit that are on their way already.
    """
    total = total_steps(edges, batch, kv_heads, unit_steps, PLAN)
    at, end = share_of(gl.program_id(0), gl.num_programs(0), total, groups)
    step = gl.to_tensor(0)
    while at < end:
        b, kv_head, i, count = unit_at(at, edges, batch, kv_heads, unit_steps, PLAN, 1)
        part = gl.minimum(end - at, count - i)
        begin = i
        if PLAN == NONE and step == 0:
            begin += ahead
            step += ahead
        for j in range(begin, i + part):
            slot = step % STAGES
            first, kind = step_of(steps, b, most, j, kv_length, PLAN, BLOCK_N)
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            if PLAN != NONE:
                say(words, slot * WORDS, first)
                say(words, slot * WORDS + 1, kind)
            load_step(
                k_desc, v_desc, k_bufs, v_bufs, k_full, v_full, slot, b, kv_head, first, KV_SHARED,
                D, DV, BLOCK_N,
            )
            step += 1
        at += part


# The consumer

@gluon.jit
def query_columns(
    query, q_strides, b, kv_head, q_length, first_column, GROUP: gl.constexpr, DIM: gl.constexpr,
    COLUMNS: gl.constexpr, LAYOUT: gl.constexpr,
):
    """[ROWS, COLUMNS] of the query rows of a unit; 0 in other rows, and from DIM on."""
    packed = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    inside, head, row = rows_of_unit(packed, kv_head, q_length, GROUP)
    # In units of what is loaded at a time.
    of_rows = (
        gl.cast(b, gl.int64) * q_strides[0] + head.to(gl.int64) * q_strides[1]
        + row.to(gl.int64) * q_strides[2]
    ) * 8
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    columns = gl.expand_dims(first_column + columns, 0)
    there = gl.expand_dims(inside, 1) & (columns < DIM)
    return gl.load(query + gl.expand_dims(of_rows, 1) + columns, mask=there, other=0.0)


@gluon.jit
def load_queries(
    q_buf, query, q_strides, b, kv_head, q_length, GROUP: gl.constexpr, DIM: gl.constexpr,
    D: gl.constexpr,
):
    """The query rows of a unit, for products of warpgroups."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    q_buf.store(query_columns(query, q_strides, b, kv_head, q_length, 0, GROUP, DIM, D, LAYOUT))
    fence_async_shared()
    # Once here, or else in each step.
    _all_threads()


@gluon.jit
def write_strange_part(
    top, query, key, value, q_strides, k_strides, v_strides, partial_out, place, steps, most, b,
    kv_head, i, part, q_length, kv_length, tables, ints, floats, shifts, scale,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, PLAN: gl.constexpr, GROUP: gl.constexpr,
    KV_SHARED: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
):
    """The sums of a part of a unit whose values aren't all finite, anew: see strange_values.py.

    Args:
        top: [ROWS] float32, of each row the largest score.
        place: where the part's rows begin in partial_out.
        i, part: the unit's step that is the part's first, the part's steps.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8],
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    packed = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    inside, head, row = rows_of_unit(packed, kv_head, q_length, GROUP)
    inside = gl.expand_dims(inside, 1)
    q_idx = gl.expand_dims(row, 1) + shifts[2]
    mod_h = gl.expand_dims(head, 1) + shifts[1]
    mod_b = b + shifts[0]
    kv_b = 0 * b if KV_SHARED else b
    k_base = key + place_of(k_strides, kv_b, kv_head)
    v_base = value + place_of(v_strides, kv_b, kv_head)
    shift = gl.where(top == float("-inf"), 0.0, top)
    shift = gl.expand_dims(gl.convert_layout(shift, gl.SliceLayout(1, LAYOUT)), 1)
    unit = unit_of_scores(scale, SCORE_MOD)
    rows = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    for first_column in range(0, VALUE_DIM, PART):
        acc = gl.full([ROWS, PART], 0.0, gl.float32, layout=LAYOUT)
        for j in range(i, i + part):
            begin, kind = step_of(steps, b, most, j, kv_length, PLAN, BLOCK_N)
            end = begin + kind // 2
            for first in range(begin, end, KEYS):
                scores = gl.full([ROWS, KEYS], 0.0, gl.float32, layout=LAYOUT)
                for d in range(0, DIM, PART):
                    q = query_columns(
                        query, q_strides, b, kv_head, q_length, d, GROUP, DIM, PART, LEFT,
                    )
                    k = load_part(k_base, k_strides[2], first, end, d, DIM, KEYS, RIGHT, True)
                    scores = mma_v2(q, k, scores)
                keys = first + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
                keys = gl.expand_dims(keys, 0)
                kv_idx = gl.minimum(keys, kv_length - 1) + shifts[3]
                if SCORE_MOD is not None:
                    scores = SCORE_MOD(
                        scores * scale, mod_b, mod_h, q_idx, kv_idx, tables, ints, floats,
                    )
                scores = masked_scores(
                    scores, True, keys < end, kind % 2 != 0, mod_b, mod_h, q_idx, kv_idx, tables,
                    ints, floats, MASK_MOD,
                )
                exponent = (scores - shift) * unit
                # Products that are summed in another order may pass the largest.
                weights = gl.exp2(gl.where(exponent > 0.0, 0.0, exponent))
                v = load_part(
                    v_base, v_strides[2], first, end, first_column, VALUE_DIM, KEYS, RIGHT, False,
                )
                finite = gl.where(strange(v), 0.0, v.to(gl.float32)).to(v.dtype)
                acc = mma_v2(gl.convert_layout(weights.to(v.dtype), LEFT), finite, acc)
                acc += seen_strange(scores != float("-inf"), v, LAYOUT, ROWS)
        columns = gl.arange(0, PART, layout=gl.SliceLayout(0, LAYOUT))
        columns = gl.expand_dims(first_column + columns, 0)
        at = partial_out + (place + rows) * VALUE_DIM + columns
        gl.store(at, acc, mask=inside & (columns < VALUE_DIM))


@gluon.jit
def write_part(
    acc, top, total, nans, is_odd, query, key, value, partial_out, partial_sums, q_strides,
    k_strides, v_strides, steps, tables, ints, floats, shifts, scale, b, kv_head, kv_heads, i,
    part, q_length, kv_length, most, SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr,
    PLAN: gl.constexpr, GROUP: gl.constexpr, KV_SHARED: gl.constexpr, DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr, DV: gl.constexpr, WANT_MAX: gl.constexpr, BLOCK_N: gl.constexpr,
    OF_ROWS: gl.constexpr, O_LAYOUT: gl.constexpr,
):
    """The sums of a part of a unit. Unit by unit and program by program, each has its own place.

    Args:
        acc: [ROWS, DV], in O_LAYOUT. top, total, nans: [ROWS], in OF_ROWS.
        is_odd: acc isn't to be had from products.
        i, part: as of `write_strange_part`.
    """
    unit = b * kv_heads + kv_head
    rows_a_unit = GROUP * q_length
    place = gl.cast(gl.program_id(0) + unit, gl.int64) * rows_a_unit
    packed = gl.arange(0, ROWS, layout=OF_ROWS)
    inside = packed < rows_a_unit
    sums = partial_sums + (place + packed) * 3
    gl.store(sums, top, mask=inside)
    gl.store(sums + 1, total, mask=inside)
    if WANT_MAX:
        gl.store(sums + 2, nans.to(gl.float32), mask=inside)
    if is_odd:
        write_strange_part(
            top, query, key, value, q_strides, k_strides, v_strides, partial_out, place, steps,
            most, b, kv_head, i, part, q_length, kv_length, tables, ints, floats, shifts, scale,
            SCORE_MOD, MASK_MOD, PLAN, GROUP, KV_SHARED, DIM, VALUE_DIM, BLOCK_N,
        )
    else:
        rows = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, O_LAYOUT)), 1)
        columns = gl.expand_dims(gl.arange(0, DV, layout=gl.SliceLayout(0, O_LAYOUT)), 0)
        there = (rows < rows_a_unit) & (columns < VALUE_DIM)
        gl.store(partial_out + (place + rows) * VALUE_DIM + columns, acc, mask=there)


@gluon.jit
def consume(
    q_buf, k_bufs, v_bufs, k_full, v_full, empty, words, query, key, value, partial_out,
    partial_sums, counts, out, rest, tops, lse, max_scores, q_strides, k_strides, v_strides,
    o_strides, edges, steps, tables, ints, floats, shifts, scale, mark, batch, kv_heads, q_length,
    kv_length, unit_steps, most, groups, SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, PLAN:
    gl.constexpr, GROUP: gl.constexpr, KV_SHARED: gl.constexpr, DIM: gl.constexpr, VALUE_DIM:
    gl.constexpr, D: gl.constexpr, DV: gl.constexpr, UNIT: gl.constexpr, ADDS: gl.constexpr,
    WANT_LSE: gl.constexpr, WANT_MAX: gl.constexpr, WANT_REST: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16],
    )
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16],
    )
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    OF_OUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    SCORED: gl.constexpr = SCORE_MOD is not None
    unit = unit_of_scores(scale, SCORE_MOD)
    programs = gl.num_programs(0)
    total_count = total_steps(edges, batch, kv_heads, unit_steps, PLAN)
    at, last = share_of(gl.program_id(0), programs, total_count, groups)
    if ADDS and PLAN != NONE:
        # Units without steps are in nobody's share. Here nobody waits for it: keys are on the way.
        for u in range(gl.program_id(0), batch * kv_heads, programs):
            b = u // kv_heads
            _, count = steps_of_unit(edges, b, u % kv_heads, kv_heads, unit_steps, PLAN)
            if count == 0:
                write_dead(
                    out, rest, tops, lse, max_scores, o_strides, scale, b, u % kv_heads, kv_heads,
                    q_length, GROUP, VALUE_DIM, DV, UNIT, SCORED, WANT_LSE, WANT_MAX, WANT_REST,
                )
    step = gl.to_tensor(0)
    while at < last:
        b, kv_head, i, count = unit_at(at, edges, batch, kv_heads, unit_steps, PLAN, 4)
        part = gl.minimum(last - at, count - i)
        u = b * kv_heads + kv_head
        if ADDS:
            found = gl.load(counts + u, volatile=True)
        load_queries(q_buf, query, q_strides, b, kv_head, q_length, GROUP, DIM, D)
        if ADDS:
            begin_count(counts + u, found, mark)
        packed = gl.arange(0, ROWS, layout=OF_ROWS)
        _, head, row = rows_of_unit(packed, kv_head, q_length, GROUP)
        mod_b = b + shifts[0]
        mod_h = gl.expand_dims(head, 1) + shifts[1]
        q_idx = gl.expand_dims(row, 1) + shifts[2]
        top = gl.full([ROWS], float("-inf"), gl.float32, layout=OF_ROWS)
        total = gl.full([ROWS], 0.0, gl.float32, layout=OF_ROWS)
        nans = gl.full([ROWS], 0, gl.int32, layout=OF_ROWS)
        acc = gl.full([ROWS, DV], 0.0, gl.float32, layout=O_LAYOUT)
        for j in range(i, i + part):
            slot = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_full.index(slot), phase)
            if PLAN == NONE:
                first, kind = step_of(steps, b, most, j, kv_length, PLAN, BLOCK_N)
            else:
                first = said(words, slot * WORDS)
                kind = said(words, slot * WORDS + 1)
            zeros = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=S_LAYOUT)
            k = k_bufs.index(slot).reshape([BLOCK_N, D]).permute((1, 0))
            raw = warpgroup_mma(q_buf, k, zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(num_outstanding=0, deps=(raw,))
            keys = gl.expand_dims(
                first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT)), 0,
            )
            kv_idx = gl.minimum(keys, kv_length - 1) + shifts[3]
            if SCORE_MOD is not None:
                scores = SCORE_MOD(
                    scores * scale, mod_b, mod_h, q_idx, kv_idx, tables, ints, floats,
                )
            if kind != BLOCK_N * 2 + 1:
                scores = masked_scores(
                    scores, True, keys < first + kind // 2, kind % 2 != 0, mod_b, mod_h, q_idx,
                    kv_idx, tables, ints, floats, MASK_MOD,
                )
            if WANT_MAX:
                nans = gl.maximum(nans, gl.max((scores != scores).to(gl.int32), 1))
            new_top = gl.maximum(top, gl.max(scores, 1))
            # Subtracted first: it may be huge. Nobody waits for it: keys take longer.
            shift = gl.where(new_top == float("-inf"), 0.0, new_top)
            weights = gl.exp2((scores - gl.expand_dims(shift, 1)) * unit)
            alpha = gl.exp2((top - shift) * unit)
            total = total * alpha + gl.sum(weights, 1)
            top = new_top
            acc = acc * gl.expand_dims(gl.convert_layout(alpha, OF_OUT), 1)
            halves = gl.convert_layout(
                weights.to(v_bufs.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2),
            )
            mbarrier.wait(v_full.index(slot), phase)
            v = v_bufs.index(slot).reshape([BLOCK_N, DV])
            acc_later = warpgroup_mma(halves, v, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_later,))
            mbarrier.arrive(empty.index(slot), count=1)
            step += 1
        rows_a_unit = GROUP * q_length
        rows = gl.expand_dims(gl.arange(0, ROWS, layout=OF_OUT), 1)
        # A value that isn't finite has reached rows that don't see it too: 0 * NaN is NaN.
        odd = gl.sum(gl.where(rows < rows_a_unit, acc * 0.0, 0.0), 1)
        is_odd = gl.max((odd != odd).to(gl.int32), 0) > 0
        if ADDS:
            if is_odd | (part < count):
                write_part(
                    acc, top, total, nans, is_odd, query, key, value, partial_out, partial_sums,
                    q_strides, k_strides, v_strides, steps, tables, ints, floats, shifts, scale, b,
                    kv_head, kv_heads, i, part, q_length, kv_length, most, SCORE_MOD, MASK_MOD,
                    PLAN, GROUP, KV_SHARED, DIM, VALUE_DIM, DV, WANT_MAX, BLOCK_N, OF_ROWS,
                    O_LAYOUT,
                )
                first_program = program_of(at - i, programs, total_count, groups)
                last_program = program_of(at - i + count - 1, programs, total_count, groups)
                # One thread counts, and says so for what all have stored.
                _all_threads()
                if counted(counts + u, mark) == last_program - first_program:
                    place = gl.cast(first_program + u, gl.int64) * rows_a_unit
                    add_parts(
                        partial_out + place * VALUE_DIM, partial_sums + place * 3,
                        last_program - first_program + 1, out, rest, tops, lse, max_scores,
                        o_strides, scale, b, kv_head, kv_heads, q_length, GROUP, VALUE_DIM, DV,
                        UNIT, SCORED, WANT_LSE, WANT_MAX, WANT_REST,
                    )
                    gl.store(counts + u, 0)
            else:
                write_rows(
                    acc, gl.convert_layout(top, OF_OUT), gl.convert_layout(total, OF_OUT),
                    gl.convert_layout(nans, OF_OUT), 0, out, rest, tops, lse, max_scores,
                    o_strides, scale, b, kv_head, kv_heads, q_length, ROWS, GROUP, VALUE_DIM, DV,
                    UNIT, SCORED, WANT_LSE, WANT_MAX, WANT_REST, O_LAYOUT,
                )
                # Not counted. But a mark that stays, and of which somebody overwrites the lowest
                # bytes alone, would count in a later launch.
                gl.store(counts + u, 0)
        else:
            write_part(
                acc, top, total, nans, is_odd, query, key, value, partial_out, partial_sums,
                q_strides, k_strides, v_strides, steps, tables, ints, floats, shifts, scale, b,
                kv_head, kv_heads, i, part, q_length, kv_length, most, SCORE_MOD, MASK_MOD, PLAN,
                GROUP, KV_SHARED, DIM, VALUE_DIM, DV, WANT_MAX, BLOCK_N, OF_ROWS, O_LAYOUT,
            )
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
    """The rows of each unit, or, without ADDS, the sums of each unit's part of each program's
    share.

    Args:
        k_desc, v_desc: descriptors [B, Hkv, S, dims] of key and value; boxes of BLOCK_N rows, D or
            DV columns.
        query: its strides (b, h, row) are counted in 8 elements.
        key, value: for `write_strange_part`, with strides (b, h, row).
        partial_out: from `decode_steps.counts_floats` on [programs + units, GROUP * L, VALUE_DIM],
            float32, relative to its own top: of program p and unit u at p + u. Behind it,
            `decode_steps.sums_place`, partial_sums: [programs + units, GROUP * L, 3], float32: the
            largest score, sum; where WANT_MAX, 1 if a score is NaN.
        counts: int64 [units], the begin of partial_out, with whatever that holds: how many parts
            of a unit are written, `decode_parts.begin_count`. To allocate one tensor less saves
            the host two microseconds.
        mark: as `decode_parts.begin_count`'s.
        out, rest, tops, lse, max_scores, o_strides: as `decode_sums.combine_kernel`'s, for ADDS,
            whose parts are added up here.
        edges: of `decode_steps.steps_kernel`, if PLAN isn't NONE, and `most` as there.
        unit_steps: of a unit, if PLAN is NONE. groups: as `decode_steps.share_of`'s.
        tables, ints, floats, shifts, scale: as `anyflex_triton.forward`'s.
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
    ahead = gl.to_tensor(0)
    if PLAN == NONE:
        # The first loads ask nobody where. So they don't wait until warps have got their parts.
        total = total_steps(edges, batch, kv_heads, unit_steps, PLAN)
        at, end = share_of(gl.program_id(0), gl.num_programs(0), total, groups)
        b, kv_head, i, count = unit_at(at, edges, batch, kv_heads, unit_steps, PLAN, 4)
        ahead = gl.minimum(gl.minimum(end - at, count - i), STAGES)
        for s in range(ahead):
            load_step(
                k_desc, v_desc, k_bufs, v_bufs, k_full, v_full, s, b, kv_head, (i + s) * BLOCK_N,
                KV_SHARED, D, DV, BLOCK_N,
            )
    gl.warp_specialize([
        (consume, (
            q_buf, k_bufs, v_bufs, k_full, v_full, empty, words, query, key, value, partial_out,
            partial_sums, counts, out, rest, tops, lse, max_scores, q_strides, k_strides,
            v_strides, o_strides, edges, steps, tables, ints, floats, shifts, scale, mark, batch,
            kv_heads, q_length, kv_length, unit_steps, most, groups, SCORE_MOD, MASK_MOD, PLAN,
            GROUP, KV_SHARED, DIM, VALUE_DIM, D, DV, UNIT, ADDS, WANT_LSE, WANT_MAX, WANT_REST,
            STAGES, BLOCK_N,
        )),
        (produce, (
            k_desc, v_desc, k_bufs, v_bufs, k_full, v_full, empty, words, edges, steps, ahead,
            batch, kv_heads, kv_length, unit_steps, most, groups, PLAN, KV_SHARED, D, DV, STAGES,
            BLOCK_N,
        )),
    ], [1], [PRODUCER_REGISTERS])
