"""Attention for a few query rows on Hopper: programs that stream keys and values without pauses.

A program has a share of all steps, whatever units they belong to (decode_steps.py). It consists of
a producer warp and a consumer warpgroup. The producer has TMA load the share's keys and values
into a ring, as far ahead as the ring has slots, also across the ends of units. A unit's query rows
are padded with zeros to the rows of a product: 64 of a warpgroup's, which reads shared memory, or
16 and 32 of each warp's, where keys and values are stored in 8 bits (stored_operands.py). At the
end of a unit's part of the share its sums are written, and the last of the unit's programs adds
them up (decode_parts.py). Where that is too much work for one program,
`decode_sums.combine_kernel` does it afterwards.
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
    Unit,
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
from anyflex_cuda.packed_steps import (
    SHARE_FACTS,
    SHARE_WORDS,
    KeyPlaces,
    lists_place,
    page_at,
    shares_place,
    unit_facts,
)
from anyflex_cuda.smem_mailbox import said, say
from anyflex_cuda.split_tiles import layout_of_products, load_box, reinterpret
from anyflex_cuda.stored_operands import (
    LEAST_SCALE,
    LOADING_THREADS,
    STORED_PRODUCTS,
    load_step_scales,
    natural_columns,
    scale_pointers,
    stored_products,
    stored_queries,
    stored_scores,
)
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
        edges: see `decode_steps.steps_kernel`, or of a packed call `packed_steps.share_kernel`.
        steps: the mask's steps, stored behind them, or by `packed_steps.list_kernel`.
        sequences: of a packed call, as in `anyflex_triton.kernel_arguments`; or None.
        most_rows: number of query rows of a unit's head; of a packed call the maximum.
    """

    edges: Any
    steps: Any
    sequences: Any
    batch: Any
    kv_heads: Any
    kv_length: Any
    unit_steps: Any
    most: Any
    groups: Any
    q_length: Any
    most_rows: Any
    PLAN: Any
    PAGE: Any
    BLOCK_N: Any


@record
class Share:
    """A program's part of all steps.

    Attributes:
        at, end: numbers of its first step and of the end.
        total: number of all steps. programs, groups: arguments of `decode_steps.share_of`.
        b: of a packed call, the sequence of the first step.
        padding: the first padding row.
    """

    at: Any
    end: Any
    total: Any
    programs: Any
    groups: Any
    b: Any
    padding: Any


@record
class DecodeRing:
    """Keys and values of STAGES steps in shared memory, the mailbox words about the steps, and
    barriers.

    Attributes:
        k_scales, v_scales: scales of keys and values that are stored in 8 bits.
        k_full, v_full: barriers; a slot is loaded, scales with keys. empty: nobody reads it any
            more.
    """

    k_bufs: Any
    v_bufs: Any
    k_scales: Any
    v_scales: Any
    k_full: Any
    v_full: Any
    empty: Any
    words: Any
    STAGES: Any


@record
class DecodeLoads:
    """Descriptors of keys and values, and their scales: arguments of `decode_kernel`."""

    k_desc: Any
    v_desc: Any
    k_scale: Any
    v_scale: Any
    STORED: Any
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
    k_scale: Any
    v_scale: Any
    GROUP: Any
    KV_SHARED: Any
    DIM: Any
    VALUE_DIM: Any
    D: Any
    DV: Any
    STORED: Any
    ROWS: Any


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
    UNIT: Any
    ADDS: Any
    ALONE: Any
    WANT_REST: Any


@record
class UnitPart:
    """The part of a unit that is in a program's share.

    Attributes:
        unit: `decode_parts.Unit`.
        first_step: number of the part's first step within the unit. steps: number of the part's
            steps.
    """

    unit: Any
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
def share_place(plan):
    """Return the pointer to this program's share of a packed call."""
    return plan.edges + shares_place(plan.batch) + gl.program_id(0) * SHARE_WORDS


@gluon.jit
def share_of_program(plan):
    """Return this program's `Share`."""
    program = gl.program_id(0)
    if plan.sequences is None:
        total = total_steps(plan.edges, plan.batch, plan.kv_heads, plan.unit_steps, plan.PLAN)
        at, end = share_of(program, gl.num_programs(0), total, plan.groups)
        return Share(
            at=at, end=end, total=total, programs=gl.num_programs(0), groups=plan.groups,
            b=gl.to_tensor(0), padding=None,
        )
    else:
        count = plan.batch
        place = share_place(plan)
        padding = gl.load(plan.sequences[1] + count)
        return Share(
            at=gl.load(place), end=gl.load(place + 1),
            total=gl.load(plan.edges + count) * plan.kv_heads,
            programs=gl.load(plan.edges + count + 1), groups=gl.load(plan.edges + count + 2),
            b=gl.load(place + 2), padding=gl.minimum(gl.maximum(padding, 0), plan.q_length),
        )


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
def unit_of(plan, b, kv_head, facts):
    """Return the `Unit` of a batch entry, or sequence, and a KV head.

    Args:
        facts: of a packed call, `packed_steps.unit_facts`.
    """
    if plan.sequences is None:
        keys = KeyPlaces(first_row=0, table=None, last_page=None, length=plan.kv_length)
        return Unit(
            entry=b, b=b, kv_head=kv_head, first_row=0, rows=plan.q_length, mod_b=b, q_shift=0,
            keys=keys,
        )
    else:
        table = plan.sequences[6]
        if plan.PAGE > 0:
            table += facts[5] * plan.sequences[12]
        keys = KeyPlaces(
            first_row=facts[4], table=table, last_page=plan.sequences[11] - 1, length=facts[6],
        )
        return Unit(
            entry=b, b=0 * b, kv_head=kv_head, first_row=facts[0], rows=facts[1],
            mod_b=facts[2], q_shift=facts[3], keys=keys,
        )


@gluon.jit
def unit_after(at, b, plan, share, WARPS: gl.constexpr):
    """Return (b, step within the unit, number of the unit's steps, `Unit`) of step `at`.

    Args:
        b: of a packed call that of a step before, or of this one.
        share: `Share`. Of a packed call the facts about its first unit are beside it: one load
            finds them all, where others wait for each other.
        WARPS: number of the caller's warps.
    """
    if plan.sequences is None:
        b, kv_head, i, count = unit_at(at, plan, WARPS)
        unit = unit_of(plan, b, kv_head, None)
    else:
        if at == share.at:
            place = share_place(plan)
            before = gl.load(place + 3)
            count = gl.load(place + 4)
            place += SHARE_FACTS
            facts = (
                gl.load(place), gl.load(place + 1), gl.load(place + 2), gl.load(place + 3),
                gl.load(place + 4), gl.load(place + 5), gl.load(place + 6),
            )
        else:
            before = gl.load(plan.edges + b)
            end = gl.load(plan.edges + b + 1)
            while end * plan.kv_heads <= at:
                b += 1
                before = end
                end = gl.load(plan.edges + b + 1)
            count = end - before
            facts = unit_facts(plan.sequences, b, plan.q_length, plan.PAGE)
        rest = at - before * plan.kv_heads
        i = rest % count
        unit = unit_of(plan, b, rest // count, facts)
    return b, i, count, unit


@gluon.jit
def step_of(plan, unit, i):
    """Return (first key, twice the number of keys, plus 1 where no mask mod is evaluated) of a
    unit's step i."""
    if plan.PLAN == NONE:
        first = i * plan.BLOCK_N
        return first, gl.minimum(unit.keys.length - first, plan.BLOCK_N) * 2 + 1
    else:
        row = unit.entry if plan.PLAN == EACH else 0 * unit.entry
        at = plan.steps + (gl.cast(row, gl.int64) * plan.most + i) * WORDS
        return gl.load(at), gl.load(at + 1)


@gluon.jit
def loaded_steps(plan, unit, i, part):
    """Return how many steps of a unit's part have keys: all, or none, where a sequence sees none.
    """
    if plan.sequences is None:
        return part
    else:
        _, kind = step_of(plan, unit, i)
        return gl.where(kind > 1, part, 0)


# The producer

@gluon.jit
def pages_of_step(loads, plan, unit, first):
    """Return the pages of a step's boxes, or the batch entry of keys that aren't in pages."""
    if plan.PAGE == 0:
        return (0 * unit.b if loads.KV_SHARED else unit.b,)
    else:
        BOX: gl.constexpr = loads.k_desc.block_shape[2]
        pages = plan.sequences[:0]
        for p in gl.static_range(plan.BLOCK_N // BOX):
            pages = pages + (page_at(unit.keys, first + p * BOX, plan.PAGE),)
        return pages


@gluon.jit
def load_rows(desc, bufs, slot, full, pages, kv_head, first, plan):
    """Load a step's keys, or values, into a slot.

    Args:
        full: the slot's barrier.
        pages: from `pages_of_step`.
        first: row of the first key in packed keys; its number where keys are in pages.
    """
    BOX: gl.constexpr = desc.block_shape[2]
    if BOX == plan.BLOCK_N:
        row = first
        if plan.PAGE != 0:
            row = first % plan.PAGE
        load_box(desc, [pages[0], kv_head, row, 0], full, bufs.index(slot))
    else:
        # Boxes are as wide as the swizzle, so that each is contiguous in a slot.
        COLUMNS: gl.constexpr = desc.block_shape[3]
        PANELS: gl.constexpr = bufs.shape[4] // COLUMNS
        BOXES: gl.constexpr = plan.BLOCK_N // BOX
        SHAPE: gl.constexpr = [bufs.shape[0] * PANELS * BOXES, 1, 1, BOX, COLUMNS]
        LAYOUT: gl.constexpr = desc.layout
        boxes = reinterpret(bufs, bufs.dtype, SHAPE, LAYOUT)
        for p in gl.static_range(BOXES):
            for c in gl.static_range(PANELS):
                at = [pages[p], kv_head, (first + p * BOX) % plan.PAGE, c * COLUMNS]
                load_box(desc, at, full, boxes.index((slot * PANELS + c) * BOXES + p))


@gluon.jit
def load_step(loads, ring, slot, pages, kv_head, first, plan):
    SIZE: gl.constexpr = 2 if loads.STORED == "plain" else 1
    mbarrier.expect(ring.k_full.index(slot), plan.BLOCK_N * loads.D * SIZE)
    load_rows(
        loads.k_desc, ring.k_bufs, slot, ring.k_full.index(slot), pages, kv_head, first, plan,
    )
    mbarrier.expect(ring.v_full.index(slot), plan.BLOCK_N * loads.DV * SIZE)
    load_rows(
        loads.v_desc, ring.v_bufs, slot, ring.v_full.index(slot), pages, kv_head, first, plan,
    )


@gluon.jit
def load_ahead(loads, ring, plan, share):
    """Load the first steps of a program's share. Return how many: of its first unit only, and no
    more than there are slots."""
    ahead = gl.to_tensor(0)
    if plan.sequences is None or share.at < share.end:
        _, i, count, unit = unit_after(share.at, share.b, plan, share, 4)
        part = gl.minimum(share.end - share.at, count - i)
        ahead = gl.minimum(loaded_steps(plan, unit, i, part), ring.STAGES)
        for step in range(ahead):
            first = (i + step) * plan.BLOCK_N
            pages = pages_of_step(loads, plan, unit, first)
            load_step(loads, ring, step, pages, unit.kv_head, unit.keys.first_row + first, plan)
    return ahead


@gluon.jit
def produce(loads, ring, plan, share, ahead):
    """Load the steps of this program's share.

    Args:
        ahead: number of steps of its first unit that are in flight already.
    """
    PLAN: gl.constexpr = plan.PLAN
    at = share.at
    b = share.b
    step = gl.to_tensor(0)
    while at < share.end:
        b, i, count, unit = unit_after(at, b, plan, share, 1)
        part = gl.minimum(share.end - at, count - i)
        keys = unit.keys
        begin = i
        if PLAN == NONE and step == 0:
            begin += ahead
            step += ahead
        for j in range(begin, i + loaded_steps(plan, unit, i, part)):
            slot = step % ring.STAGES
            first, kind = step_of(plan, unit, j)
            # Loads of pages are issued before the wait.
            pages = pages_of_step(loads, plan, unit, first)
            mbarrier.wait(ring.empty.index(slot), ((step // ring.STAGES) & 1) ^ 1)
            if PLAN != NONE:
                say(ring.words, slot * WORDS, first)
                say(ring.words, slot * WORDS + 1, kind)
            load_step(loads, ring, slot, pages, unit.kv_head, keys.first_row + first, plan)
            if loads.STORED != "plain":
                load_step_scales(
                    loads.k_scale, loads.v_scale, ring, slot, unit, first, kind, plan.PAGE,
                )
            step += 1
        at += part


# The consumer

@gluon.jit
def query_columns(
    call, unit, first_column, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr,
):
    """Return [ROWS, COLUMNS] of a unit's query rows; 0 in other rows, and from column DIM on."""
    tensors = call.tensors
    ROWS: gl.constexpr = tensors.ROWS
    strides = tensors.q_strides
    packed = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    inside, head, row = rows_of_unit(packed, unit, tensors.GROUP)
    # Offsets are counted in units of one load.
    of_rows = (
        gl.cast(unit.b, gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
        + (unit.first_row + row).to(gl.int64) * strides[2]
    ) * 8
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    columns = gl.expand_dims(first_column + columns, 0)
    there = gl.expand_dims(inside, 1) & (columns < tensors.DIM)
    return gl.load(tensors.query + gl.expand_dims(of_rows, 1) + columns, mask=there, other=0.0)


@gluon.jit
def load_queries(call, unit):
    """Return a unit's query rows: an operand of warpgroup products, or what `stored_queries`
    returns."""
    D: gl.constexpr = call.tensors.D
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    q = query_columns(call, unit, 0, D, LAYOUT)
    if call.tensors.STORED != "plain":
        return stored_queries(q)
    else:
        call.q_buf.store(q)
        fence_async_shared()
        # One barrier here replaces one in each step.
        _all_threads()
        return call.q_buf


@gluon.jit
def pointed_at(tensor, strides, kv_b, unit, first, plan, DIM: gl.constexpr):
    """Return `PointedRows` of a unit's keys or values, for KEYS rows from `first` on, which no
    page ends within."""
    base = tensor + place_of(strides, kv_b, unit.kv_head)
    if plan.PAGE != 0:
        page = page_at(unit.keys, first, plan.PAGE)
        base += gl.cast(page, gl.int64) * strides[0]
        base += gl.cast(first % plan.PAGE - first, gl.int64) * strides[2]
    elif plan.sequences is not None:
        base += gl.cast(unit.keys.first_row, gl.int64) * strides[2]
    return PointedRows(base=base, stride=strides[2], DIM=DIM)


@gluon.jit
def scales_of(scales, unit, keys, end, plan):
    """Load the scales of a unit's keys before `end`."""
    at = scale_pointers(scales, unit.keys, unit.kv_head, keys, plan.PAGE)
    return gl.load(at, mask=keys < end, other=0.0)


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
    ROWS: gl.constexpr = tensors.ROWS
    DTYPE: gl.constexpr = tensors.query.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8],
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    packed = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    unit = part.unit
    inside, head, row = rows_of_unit(packed, unit, tensors.GROUP)
    inside = gl.expand_dims(inside, 1)
    q_idx = gl.expand_dims(row, 1) + unit.q_shift + mods.shifts[2]
    mod_h = gl.expand_dims(head, 1) + mods.shifts[1]
    mod_b = unit.mod_b + mods.shifts[0]
    kv_b = 0 * unit.b if tensors.KV_SHARED else unit.b
    shift = gl.where(row_max == float("-inf"), 0.0, row_max)
    shift = gl.expand_dims(gl.convert_layout(shift, gl.SliceLayout(1, LAYOUT)), 1)
    log_unit = unit_of_scores(mods.scale, mods.SCORE_MOD)
    rows = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    for first_column in range(0, tensors.VALUE_DIM, PART):
        acc = gl.full([ROWS, PART], 0.0, gl.float32, layout=LAYOUT)
        for j in range(part.first_step, part.first_step + part.steps):
            begin, kind = step_of(plan, unit, j)
            end = begin + kind // 2
            for first in range(begin, end, KEYS):
                pointed_keys = pointed_at(
                    tensors.key, tensors.k_strides, kv_b, unit, first, plan, tensors.DIM,
                )
                pointed_values = pointed_at(
                    tensors.value, tensors.v_strides, kv_b, unit, first, plan, tensors.VALUE_DIM,
                )
                scores = gl.full([ROWS, KEYS], 0.0, gl.float32, layout=LAYOUT)
                for d in range(0, tensors.DIM, PART):
                    q = query_columns(call, unit, d, PART, LEFT)
                    k = load_part(pointed_keys, first, end, d, KEYS, RIGHT, True)
                    scores = mma_v2(q, k.to(gl.float32).to(DTYPE), scores)
                keys = first + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
                if tensors.STORED != "plain":
                    scores *= gl.expand_dims(scales_of(tensors.k_scale, unit, keys, end, plan), 0)
                keys = gl.expand_dims(keys, 0)
                kv_idx = gl.minimum(keys, unit.keys.length - 1) + mods.shifts[3]
                if mods.SCORE_MOD is not None:
                    scores = mods.SCORE_MOD(
                        scores * mods.scale, mod_b, mod_h, q_idx, kv_idx, call.tables, mods.ints,
                        mods.floats,
                    )
                scores = masked_scores(
                    scores, True, keys < end, kind % 2 != 0, mod_b, mod_h, q_idx, kv_idx,
                    call.tables, mods.ints, mods.floats, mods.MASK_MOD,
                )
                exponent = (scores - shift) * log_unit
                # Products summed in another order may exceed row_max slightly.
                weights = gl.exp2(gl.where(exponent > 0.0, 0.0, exponent))
                v = load_part(pointed_values, first, end, first_column, KEYS, RIGHT, False)
                if tensors.STORED != "plain":
                    of_values = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, RIGHT))
                    of_values = scales_of(tensors.v_scale, unit, of_values, end, plan)
                    v = (v.to(gl.float32) * gl.expand_dims(of_values, 1)).to(DTYPE)
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
    """Write the sums of a part of a unit, to its `part_place`.

    Args:
        acc: [ROWS, DV], in O_LAYOUT. sums: `PartSums`, in OF_ROWS.
        is_nonfinite: whether acc is non-finite and has to be computed without 0 * NaN.
    """
    VALUE_DIM: gl.constexpr = call.tensors.VALUE_DIM
    ROWS: gl.constexpr = call.tensors.ROWS
    rows_a_unit = call.tensors.GROUP * part.unit.rows
    place = gl.program_id(0) * 2 + gl.where(part.first_step == 0, 1, 0)
    place = gl.cast(place, gl.int64) * (call.tensors.GROUP * call.plan.most_rows)
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
def zero_rows(bufs, slot, keys, BLOCK_N: gl.constexpr):
    """Zero a slot's rows from row `keys` on: what they hold is nobody's, and 0 * NaN is NaN."""
    COLUMNS: gl.constexpr = 64 if bufs.shape[4] > 64 else bufs.shape[4]
    PANELS: gl.constexpr = bufs.shape[4] // COLUMNS
    PIECES: gl.constexpr = BLOCK_N // KEYS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, KEYS, COLUMNS], bufs.dtype)
    SHAPE: gl.constexpr = [bufs.shape[0] * PANELS * PIECES, 1, 1, KEYS, COLUMNS]
    pieces = reinterpret(bufs, bufs.dtype, SHAPE, SHARED)
    rows = gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    for p in range(keys // KEYS, PIECES):
        for c in gl.static_range(PANELS):
            piece = pieces.index((slot * PANELS + c) * PIECES + p).reshape([KEYS, COLUMNS])
            piece.store(gl.where(rows + p * KEYS < keys, piece.load(LAYOUT), 0.0))
    fence_async_shared()
    _all_threads()


@gluon.jit
def write_padding(outputs, plan, first_row):
    """Write the padding rows, which begin at `first_row`, a part in each program."""
    tiles = (plan.q_length - first_row + KEYS - 1) // KEYS
    for u in range(gl.program_id(0), tiles * plan.kv_heads, gl.num_programs(0)):
        begin = first_row + u // plan.kv_heads * KEYS
        unit = Unit(
            entry=0 * u, b=0 * u, kv_head=u % plan.kv_heads, first_row=begin,
            rows=gl.minimum(plan.q_length - begin, KEYS), mod_b=None, q_shift=None, keys=None,
        )
        write_dead(outputs, unit)


@gluon.jit
def consume(call, share):
    """Take the steps of a program's share, and write rows or sums of parts.

    Args:
        call: `DecodeCall`. share: `Share`.
    """
    ring = call.ring
    plan = call.plan
    tensors = call.tensors
    mods = call.mods
    scale = mods.scale
    PLAN: gl.constexpr = plan.PLAN
    BLOCK_N: gl.constexpr = plan.BLOCK_N
    DV: gl.constexpr = tensors.DV
    VALUE_DIM: gl.constexpr = tensors.VALUE_DIM
    SCORE_MOD: gl.constexpr = mods.SCORE_MOD
    STORED: gl.constexpr = tensors.STORED
    ROWS: gl.constexpr = tensors.ROWS
    WIDE: gl.constexpr = STORED == "plain"
    S_LAYOUT: gl.constexpr = layout_of_products(BLOCK_N) if WIDE else STORED_PRODUCTS
    O_LAYOUT: gl.constexpr = layout_of_products(DV) if WIDE else STORED_PRODUCTS
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    OF_OUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    outputs = UnitOutputs(
        out=call.out, rest=call.rest, o_strides=call.o_strides, results=call.results, scale=scale,
        kv_heads=plan.kv_heads, q_length=plan.q_length, most_rows=plan.most_rows,
        GROUP=tensors.GROUP, VALUE_DIM=VALUE_DIM, DV=DV, UNIT=call.UNIT, WANT_REST=call.WANT_REST,
    )
    log_unit = unit_of_scores(scale, SCORE_MOD)
    if call.ALONE:
        write_padding(outputs, plan, share.padding)
    if call.ADDS and PLAN != NONE and plan.sequences is None:
        # Units without steps are in no program's share. Writing their rows here costs nothing
        # while the first keys are in flight.
        for u in range(gl.program_id(0), plan.batch * plan.kv_heads, gl.num_programs(0)):
            b = u // plan.kv_heads
            _, count = steps_of_unit(
                plan.edges, b, u % plan.kv_heads, plan.kv_heads, plan.unit_steps, PLAN,
            )
            if count == 0:
                write_dead(outputs, unit_of(plan, b, u % plan.kv_heads, None))
    at = share.at
    b = share.b
    step = gl.to_tensor(0)
    while at < share.end:
        b, i, count, unit = unit_after(at, b, plan, share, 4)
        part = gl.minimum(share.end - at, count - i)
        u = b * plan.kv_heads + unit.kv_head
        if call.ADDS:
            found = gl.load(call.counts + u, volatile=True)
        queries = load_queries(call, unit)
        if call.ADDS:
            begin_count(call.counts + u, found, call.mark)
        packed = gl.arange(0, ROWS, layout=OF_ROWS)
        _, head, row = rows_of_unit(packed, unit, tensors.GROUP)
        mod_b = unit.mod_b + mods.shifts[0]
        mod_h = gl.expand_dims(head, 1) + mods.shifts[1]
        q_idx = gl.expand_dims(row, 1) + unit.q_shift + mods.shifts[2]
        row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=OF_ROWS)
        if STORED == "plain":
            row_sum = gl.full([ROWS], 0.0, gl.float32, layout=OF_ROWS)
        else:
            # Keys are different warps', so they are added up once.
            row_sum = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=S_LAYOUT)
            top = gl.to_tensor(LEAST_SCALE)
        nans = gl.full([ROWS], 0, gl.int32, layout=OF_ROWS)
        acc = gl.full([ROWS, DV], 0.0, gl.float32, layout=O_LAYOUT)
        for j in range(i, i + loaded_steps(plan, unit, i, part)):
            slot = step % ring.STAGES
            phase = (step // ring.STAGES) & 1
            mbarrier.wait(ring.k_full.index(slot), phase)
            if PLAN == NONE:
                first, kind = step_of(plan, unit, j)
            else:
                first = said(ring.words, slot * WORDS)
                kind = said(ring.words, slot * WORDS + 1)
            if STORED == "plain":
                zeros = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=S_LAYOUT)
                k = ring.k_bufs.index(slot).reshape([BLOCK_N, tensors.D]).permute((1, 0))
                raw = warpgroup_mma(queries, k, zeros, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(num_outstanding=0, deps=(raw,))
            else:
                scores = stored_scores(queries, ring, slot, STORED)
            keys = gl.expand_dims(
                first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT)), 0,
            )
            kv_idx = gl.minimum(keys, unit.keys.length - 1) + mods.shifts[3]
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
            weights = gl.exp2((scores - gl.expand_dims(shift, 1)) * log_unit)
            alpha = gl.exp2((row_max - shift) * log_unit)
            row_max = new_max
            if STORED == "plain":
                row_sum = row_sum * alpha + gl.sum(weights, 1)
                acc = acc * gl.expand_dims(gl.convert_layout(alpha, OF_OUT), 1)
                halves = gl.convert_layout(
                    weights.to(ring.v_bufs.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2),
                )
                mbarrier.wait(ring.v_full.index(slot), phase)
                if plan.sequences is not None and kind < BLOCK_N * 2:
                    zero_rows(ring.v_bufs, slot, kind // 2, BLOCK_N)
                v = ring.v_bufs.index(slot).reshape([BLOCK_N, DV])
                acc_later = warpgroup_mma(halves, v, acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_later,))
            else:
                row_sum = row_sum * gl.expand_dims(alpha, 1) + weights
                mbarrier.wait(ring.v_full.index(slot), phase)
                acc, top = stored_products(
                    weights, alpha, acc, top, ring, slot, kind // 2, STORED,
                )
            mbarrier.arrive(ring.empty.index(slot), count=1)
            step += 1
        if STORED != "plain":
            acc = natural_columns(acc * top)
            row_sum = gl.sum(row_sum, 1)
        rows = gl.expand_dims(gl.arange(0, ROWS, layout=OF_OUT), 1)
        # Non-finite values also reach rows that don't see them: 0 * NaN is NaN.
        zeros = gl.sum(gl.where(rows < tensors.GROUP * unit.rows, acc * 0.0, 0.0), 1)
        is_nonfinite = gl.max((zeros != zeros).to(gl.int32), 0) > 0
        sums = PartSums(row_max=row_max, row_sum=row_sum, nans=nans)
        unit_part = UnitPart(unit=unit, first_step=i, steps=part)
        if is_nonfinite | (part < count):
            write_part(acc, sums, is_nonfinite, call, unit_part, OF_ROWS, O_LAYOUT)
            programs = share.programs
            first_program = program_of(at - i, programs, share.total, share.groups)
            last_program = program_of(at - i + count - 1, programs, share.total, share.groups)
            # One thread counts, with release semantics for the stores of all.
            _all_threads()
            if call.ADDS:
                is_last = counted(call.counts + u, call.mark) == last_program - first_program
            else:
                is_last = part == count
            if is_last:
                add_parts(
                    tensors.partial_out, call.partial_sums, first_program,
                    last_program - first_program + 1, outputs, unit,
                )
                if call.ADDS:
                    gl.store(call.counts + u, 0)
        else:
            write_rows(
                acc, gl.convert_layout(row_max, OF_OUT), gl.convert_layout(row_sum, OF_OUT),
                gl.convert_layout(nans, OF_OUT), 0, outputs, unit, ROWS, O_LAYOUT,
            )
            if call.ADDS:
                # This unit isn't counted. But a stale mark whose lowest bytes alone are
                # overwritten would count in a later launch.
                gl.store(call.counts + u, 0)
        at += part


@gluon.jit
def decode_kernel(
    k_desc, v_desc, query, key, value, partial_out, counts, out, rest, tops, lse, max_scores,
    q_strides, k_strides, v_strides, o_strides, edges, tables, ints, floats, shifts, scale, sinks,
    mark, sequences, k_scale, v_scale, batch, kv_heads, q_length, kv_length, unit_steps, most,
    most_rows, groups,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, PLAN: gl.constexpr, PAGE: gl.constexpr,
    GROUP: gl.constexpr, KV_SHARED: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, UNIT: gl.constexpr, ADDS: gl.constexpr,
    ALONE: gl.constexpr, WANT_LSE: gl.constexpr, WANT_MAX: gl.constexpr, WANT_REST: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    STORED: gl.constexpr, ROWS: gl.constexpr,
):
    """Decoding kernel: each unit's rows, or, without ADDS, the sums of the parts of those units
    that several programs share.

    Args:
        k_desc, v_desc: descriptors [B, Hkv, S, dims] of key and value; boxes of BLOCK_N rows, D or
            DV columns. Of pools of pages [P, Hkv, PAGE, dims], boxes that no page ends within:
            where they have fewer rows, they have 64 columns.
        query: pointer, with strides (b, h, row) in units of 8 elements.
        key, value: pointers for `write_nonfinite_part`, with strides (b, h, row).
        partial_out: from `decode_steps.counts_floats` on [2 * programs, GROUP * most_rows,
            VALUE_DIM], float32: parts by `decode_steps.part_place`, relative to their own row_max.
            Behind it, from `decode_steps.sums_place` on, partial_sums: [2 * programs, GROUP *
            most_rows, 3], float32: row_max, row_sum, and where WANT_MAX 1 if a score is NaN.
        counts: int64 [units] at the begin of partial_out, uninitialized: number of a unit's parts
            that are written, see `decode_parts.begin_count`. One tensor less to allocate saves the
            host two microseconds.
        out, rest, tops, lse, max_scores, o_strides: as in `decode_sums.combine_kernel`.
        edges: of a packed call what `packed_steps.share_kernel` and `packed_steps.list_kernel`
            write.
        batch: number of batch entries, or of sequences.
        most_rows: maximum number of query rows of a head of a unit; sequences with more are left
            to another kernel.
        k_scale, v_scale: (pointer, strides of page, head and row), where STORED isn't "plain".
        ALONE: whether no other kernel writes the padding rows of a packed call.
    """
    partial_out += counts_floats(batch * kv_heads)
    partial_sums = partial_out + sums_place(gl.num_programs(0), GROUP * most_rows, VALUE_DIM)
    if sequences is None:
        steps = edges + steps_place(batch if PLAN == EACH else 1)
    else:
        steps = edges + lists_place(batch, gl.num_programs(0)) + batch
    ONE_ROW: gl.constexpr = mbarrier.MBarrierLayout()
    WORD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_buf = None
    k_scales = None
    v_scales = None
    LOADERS: gl.constexpr = 0 if STORED == "plain" else LOADING_THREADS
    if STORED == "plain":
        Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], k_desc.dtype)
        q_buf = gl.allocate_shared_memory(k_desc.dtype, [ROWS, D], Q_LAYOUT)
    else:
        k_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], WORD)
        v_scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], WORD)
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, DV], v_desc.layout)
    words = gl.allocate_shared_memory(gl.int32, [STAGES * WORDS, 1], WORD)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1 + LOADERS)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    fence_async_shared()
    plan = StepPlan(
        edges=edges, steps=steps, sequences=sequences, batch=batch,
        kv_heads=kv_heads, kv_length=kv_length, unit_steps=unit_steps, most=most, groups=groups,
        q_length=q_length, most_rows=most_rows, PLAN=PLAN, PAGE=PAGE, BLOCK_N=BLOCK_N,
    )
    ring = DecodeRing(
        k_bufs=k_bufs, v_bufs=v_bufs, k_scales=k_scales, v_scales=v_scales, k_full=k_full,
        v_full=v_full, empty=empty, words=words, STAGES=STAGES,
    )
    loads = DecodeLoads(
        k_desc=k_desc, v_desc=v_desc, k_scale=k_scale, v_scale=v_scale, STORED=STORED,
        KV_SHARED=KV_SHARED, D=D, DV=DV,
    )
    call = DecodeCall(
        q_buf=q_buf, ring=ring,
        tensors=DecodeTensors(
            query=query, key=key, value=value, partial_out=partial_out, q_strides=q_strides,
            k_strides=k_strides, v_strides=v_strides, k_scale=k_scale, v_scale=v_scale,
            GROUP=GROUP, KV_SHARED=KV_SHARED, DIM=DIM, VALUE_DIM=VALUE_DIM, D=D, DV=DV,
            STORED=STORED, ROWS=ROWS,
        ),
        partial_sums=partial_sums, counts=counts, out=out, rest=rest,
        results=RowResults(
            tops=tops, lse=lse, max_scores=max_scores, SCORED=SCORE_MOD is not None,
            WANT_LSE=WANT_LSE, WANT_MAX=WANT_MAX, WANT_TOPS=WANT_REST, sinks=sinks,
        ),
        o_strides=o_strides, plan=plan, tables=tables,
        mods=Mods(
            ints=ints, floats=floats, shifts=shifts, scale=scale, READ=None, SCORE_MOD=SCORE_MOD,
            MASK_MOD=MASK_MOD,
        ),
        mark=mark, UNIT=UNIT, ADDS=ADDS, ALONE=ALONE, WANT_REST=WANT_REST,
    )
    share = share_of_program(plan)
    ahead = gl.to_tensor(0)
    if PLAN == NONE and STORED == "plain":
        # The first loads depend on nothing in shared memory, so they are issued before the warps
        # get their roles. Scales are copied by one warp.
        ahead = load_ahead(loads, ring, plan, share)
    gl.warp_specialize([
        (consume, (call, share)),
        (produce, (loads, ring, plan, share, ahead)),
    ], [1], [PRODUCER_REGISTERS])
