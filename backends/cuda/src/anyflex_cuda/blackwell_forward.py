"""Attention forward on Blackwell (sm_100): a producer warp, a multiplier warp, and two softmax
warpgroups.

A tile is 256 query rows, 128 for each warpgroup. The producer takes tiles one after the other,
merges the runs of both halves' rows of the block mask, has TMA load queries, keys and values, and
writes into a ring of orders what it loads and for which group. The multiplier has the tensor cores
make scores and accumulate weighted values in tensor memory. A group reads its scores, one row per
thread, stores the weights over them, and reads its accumulator at the end of the tile
(FlashAttention-4's division of the work, except that a group rescales its accumulator itself). One
group's softmax overlaps the other's products.

One warp issues all products, and the tensor cores run them in that order. So a group's next scores
may be issued right after the product that reads the weights they overwrite, and a wait for scores
is also a wait for the previous step's accumulation. No barrier gets two phases ahead of a waiter:
a group's next scores need its last weights, the next tile's accumulator needs weights of that
tile, and a tile in which a group has no step signals no accumulator.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)

from anyflex_cuda.apply_mods import scores_of_step
from anyflex_cuda.kernel_records import (
    KeyRing,
    LoadDescriptors,
    MaskRuns,
    PointedTensors,
    StepMods,
    TileSchedule,
)
from anyflex_cuda.nonfinite_rows import write_nonfinite_rows
from anyflex_cuda.smem_mailbox import WORDS, said, say
from anyflex_cuda.split_tiles import load_box, reinterpret, store_box
from anyflex_cuda.write_softmax_stats import larger, with_sinks, write_row_sums
from anyflex_triton.device_functions import (
    FAR,
    FULL,
    ModInputs,
    Mods,
    RowResults,
    is_far,
    mask_row,
    nonfinite,
    record,
    tile_of_program,
    unit_of_scores,
)

__all__ = ["ROWS", "forward_kernel"]


@record
class OrderRing:
    """Ring of orders from the producer to the multiplier and the groups, in shared memory, and the
    barriers of its slots."""

    words: Any
    full: Any
    empty: Any


@record
class GroupQueries:
    """Both groups' queries in shared memory.

    Attributes:
        full: barriers; a group's queries are loaded. empty: nobody reads a tile's queries any
            more.
    """

    bufs: Any
    full: Any
    empty: Any


@record
class GroupMemory:
    """Scores and accumulators in tensor memory, of both groups or of one.

    Attributes:
        done: barriers; scores are complete. weighed: weights are stored. summed: the tile's
            accumulator is complete.
    """

    scores: Any
    sums: Any
    done: Any
    weighed: Any
    summed: Any


@record
class LoadingTile:
    """A tile's place, as the producer loads it.

    Attributes:
        first_step: number of the tile's first step, counted over all tiles. filled: number of
            earlier tiles that had a step.
        run_0, last_0, run_1, last_1: the first and the end of each group's runs.
    """

    b: Any
    h: Any
    kv_b: Any
    kv_head: Any
    first_row: Any
    first_step: Any
    filled: Any
    run_0: Any
    last_0: Any
    run_1: Any
    last_1: Any


@record
class GroupSoftmax:
    """State of a group's online softmax.

    Attributes:
        base: exponent of two that weights are relative to; at most the largest score so far, and
            at most SLACK below it.
        row_max: the largest score so far; where WANT_MAX, NaN if any score was NaN.
        row_sum: sum of weights.
    """

    base: Any
    row_max: Any
    row_sum: Any


@record
class GroupCall:
    """Arguments of a group.

    Attributes:
        o_desc, r_desc, o_bufs: descriptors of out and rest, and the shared memory that both are
            stored from.
        mods: `anyflex_triton.kernel_records.Mods`. MASK_SCORES: its mask mod as a function of
            scores.
        results: `anyflex_triton.kernel_records.RowResults`.
        MASKED: whether any step may have dead pairs.
        DV, EVEN, BLOCK_N, PIECE: arguments of `forward_kernel`.
    """

    o_desc: Any
    r_desc: Any
    o_bufs: Any
    memory: Any
    orders: Any
    tensors: Any
    mask: Any
    results: Any
    tables: Any
    mods: Any
    heads: Any
    q_length: Any
    kv_length: Any
    MASK_SCORES: Any
    DV: Any
    EVEN: Any
    MASKED: Any
    BLOCK_N: Any
    PIECE: Any


# Argument lists would be a line an argument.
# fmt: off

ROWS = gl.constexpr(128)
"""Query rows of a group: the lanes of tensor memory, one thread per row."""
ORDERS = gl.constexpr(8)
"""Number of slots of the ring of orders."""
SLACK = gl.constexpr(8.0)
"""Exponent of two by which scores may exceed `GroupSoftmax.base` before the accumulator is
rescaled."""
BEHIND = gl.constexpr(0x3FFFFFFF)
"""Position past all keys."""

# Kinds of orders, one per group.
NOTHING = gl.constexpr(0)
ASKED = gl.constexpr(1)
"""Step whose live pairs the mask mod decides."""
COVERED = gl.constexpr(2)
"""Step whose pairs are live up to its end."""
PLAIN = gl.constexpr(3)
"""Step whose pairs are all live."""
TILE = gl.constexpr(4)
"""End of the previous tile, and begin of another."""
STOP = gl.constexpr(5)
"""End of the last tile."""


# Orders

@gluon.jit
def give_order(orders, order, kind_0, kind_1, x, y, z):
    """Write an order (producer). For a step x, y are first key and end; for a tile x, y, z are
    first row, b, h."""
    slot = order % ORDERS
    mbarrier.wait(orders.empty.index(slot), ((order // ORDERS) & 1) ^ 1)
    say(orders.words, slot * WORDS, kind_0)
    say(orders.words, slot * WORDS + 1, kind_1)
    say(orders.words, slot * WORDS + 2, x)
    say(orders.words, slot * WORDS + 3, y)
    say(orders.words, slot * WORDS + 4, z)
    mbarrier.arrive(orders.full.index(slot), count=1)


@gluon.jit
def drop_order(orders, order):
    """Release an order's slot: the caller doesn't read it any more."""
    mbarrier.arrive(orders.empty.index(order % ORDERS), count=1)


@gluon.jit
def order_for(orders, order, ME: gl.constexpr):
    """Return (order, kind) of group ME's next order, from `order` on."""
    mbarrier.wait(orders.full.index(order % ORDERS), (order // ORDERS) & 1)
    kind = said(orders.words, order % ORDERS * WORDS + ME)
    while kind == NOTHING:
        drop_order(orders, order)
        order += 1
        mbarrier.wait(orders.full.index(order % ORDERS), (order // ORDERS) & 1)
        kind = said(orders.words, order % ORDERS * WORDS + ME)
    return order, kind


# The producer

@gluon.jit
def run_at(mask, run, last_run, kv_length):
    """Return (begin, end, 1 if FULL) of a run in keys; BEHIND where there is no run."""
    there = run < last_run
    if mask.HAS_MASK:
        at = mask.runs + run * 3
        begin = gl.load(at, mask=there, other=0) * mask.KV_BLOCK
        end = gl.minimum(gl.load(at + 1, mask=there, other=0) * mask.KV_BLOCK, kv_length)
        full = gl.where(gl.load(at + 2, mask=there, other=0) == FULL, 1, 0)
        return gl.where(there, begin, BEHIND), gl.where(there, end, BEHIND), full
    else:
        return gl.where(there, 0, BEHIND), gl.where(there, kv_length, BEHIND), gl.where(there, 1,
        0)


@gluon.jit
def kind_of(inside, full, PART: gl.constexpr):
    """Return the kind of order that a group gets for steps of PART."""
    if PART == 0:
        return gl.where(inside, gl.where(full == 1, COVERED, ASKED), NOTHING)
    else:
        return gl.where(inside, PLAIN, NOTHING)


@gluon.jit
def load_step(descs, queries, ring, tile, step, first):
    """Load keys and values of a step. A tile's queries are loaded between its first step's keys
    and values, because a slot for keys is free earlier."""
    slot = step % ring.STAGES
    phase = ((step // ring.STAGES) & 1) ^ 1
    at = [tile.kv_b, tile.kv_head, first, 0]
    mbarrier.wait(ring.k_empty.index(slot), phase)
    mbarrier.expect(ring.k_full.index(slot), ring.BLOCK_N * descs.D * 2)
    load_box(descs.k, at, ring.k_full.index(slot), ring.k_bufs.index(slot))
    if step == tile.first_step:
        mbarrier.wait(queries.empty, (tile.filled & 1) ^ 1)
        for g in gl.static_range(2):
            full = queries.full.index(g)
            mbarrier.expect(full, ROWS * descs.D * 2)
            of_group = [tile.b, tile.h, tile.first_row + g * ROWS, 0]
            load_box(descs.q, of_group, full, queries.bufs.index(g))
    mbarrier.wait(ring.v_empty.index(slot), phase)
    mbarrier.expect(ring.v_full.index(slot), ring.BLOCK_N * descs.DV * 2)
    load_box(descs.v, at, ring.v_full.index(slot), ring.v_bufs.index(slot))


@gluon.jit
def load_steps(
    descs, queries, ring, orders, mask, tile, order, step, kv_length, PART: gl.constexpr,
):
    """Load a tile's steps that may have dead pairs (PART 0), or the others (PART 1). Return the
    next (order, step).

    Both groups' runs are cut where one of them begins or ends: between two cuts each group has the
    same kind of pairs, or nothing to do.
    """
    BLOCK_N: gl.constexpr = ring.BLOCK_N
    run_0 = tile.run_0
    run_1 = tile.run_1
    begin_0, end_0, full_0 = run_at(mask, run_0, tile.last_0, kv_length)
    begin_1, end_1, full_1 = run_at(mask, run_1, tile.last_1, kv_length)
    cut = gl.minimum(begin_0, begin_1)
    while cut < BEHIND:
        inside_0 = begin_0 == cut
        inside_1 = begin_1 == cut
        stop = gl.minimum(
            gl.where(inside_0, end_0, begin_0), gl.where(inside_1, end_1, begin_1),
        )
        plain = gl.where(inside_0, full_0, 1) * gl.where(inside_1, full_1, 1)
        middle = cut + (stop - cut) // BLOCK_N * BLOCK_N * plain
        if PART == 0:
            first = middle
            end = stop
        else:
            first = cut
            end = middle
        for key in range(first, end, BLOCK_N):
            give_order(
                orders, order, kind_of(inside_0, full_0, PART), kind_of(inside_1, full_1, PART),
                key, end, 0,
            )
            load_step(descs, queries, ring, tile, step, key)
            order += 1
            step += 1
        if inside_0:
            begin_0 = stop
            if stop == end_0:
                run_0 += 1
                begin_0, end_0, full_0 = run_at(mask, run_0, tile.last_0, kv_length)
        if inside_1:
            begin_1 = stop
            if stop == end_1:
                run_1 += 1
                begin_1, end_1, full_1 = run_at(mask, run_1, tile.last_1, kv_length)
        cut = gl.minimum(begin_0, begin_1)
    return order, step


@gluon.jit
def runs_of(mask, b, h, first_row, q_length):
    """Return (first, end) of a group's runs; an empty range where it has no row."""
    if mask.HAS_MASK:
        run = gl.to_tensor(0)
        last_run = gl.to_tensor(0)
        if first_row < q_length:
            run, last_run = mask_row(
                mask.offsets, mask.ends, mask.strides, b, h, first_row // mask.Q_BLOCK,
            )
        return run, last_run
    else:
        return gl.to_tensor(0), gl.where(first_row < q_length, 1, 0)


@gluon.jit
def produce(
    descs, queries, ring, orders, mask, schedule, q_length, kv_length, MASKED: gl.constexpr,
):
    order = gl.to_tensor(0)
    step = gl.to_tensor(0)
    filled = gl.to_tensor(0)
    count = schedule.tiles * schedule.batch_heads
    at = gl.program_id(0)
    while at < count:
        following = count
        if gl.num_programs(0) < count:
            # Issued early: the atomic's latency is that of a step.
            following = gl.num_programs(0) + gl.atomic_add(schedule.counter, 1, sem="relaxed")
        tile, bh = tile_of_program(at, schedule.tiles, schedule.batch_heads, schedule.head_group)
        b = bh // schedule.heads
        h = bh % schedule.heads
        kv_head = h // schedule.GROUP
        kv_b = 0 * b if schedule.KV_SHARED else b
        if mask.HAS_MASK:  # noqa: SIM102  the other is known at run time alone
            if schedule.ordered:
                strides = schedule.order_strides
                tile = gl.load(schedule.tile_order + b * strides[0] + h * strides[1] + tile)
        first_row = tile * (2 * ROWS)
        give_order(orders, order, TILE, TILE, first_row, b, h)
        order += 1
        run_0, last_0 = runs_of(mask, b, h, first_row, q_length)
        run_1, last_1 = runs_of(mask, b, h, first_row + ROWS, q_length)
        loading = LoadingTile(
            b=b, h=h, kv_b=kv_b, kv_head=kv_head, first_row=first_row, first_step=step,
            filled=filled, run_0=run_0, last_0=last_0, run_1=run_1, last_1=last_1,
        )
        if MASKED:
            order, step = load_steps(
                descs, queries, ring, orders, mask, loading, order, step, kv_length, 0,
            )
        order, step = load_steps(
            descs, queries, ring, orders, mask, loading, order, step, kv_length, 1,
        )
        if step > loading.first_step:
            filled += 1
        at = following
    give_order(orders, order, STOP, STOP, 0, 0, 0)


# The multiplier

@gluon.jit
def order_of_both(orders, order):
    """Return both groups' kinds of the next order, and release its slot."""
    mbarrier.wait(orders.full.index(order % ORDERS), (order // ORDERS) & 1)
    kind_0 = said(orders.words, order % ORDERS * WORDS, 1)
    kind_1 = said(orders.words, order % ORDERS * WORDS + 1, 1)
    drop_order(orders, order)
    return kind_0, kind_1


@gluon.jit
def weights_in(scores, DTYPE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the tensor memory of a group's weights, which overlays its scores."""
    LAYOUT: gl.constexpr = TensorMemoryLayout((ROWS, BLOCK_N), col_stride=1)
    halves = reinterpret(scores, DTYPE, [ROWS, BLOCK_N * 2], LAYOUT)
    return halves.slice(0, BLOCK_N)


@gluon.jit
def add_values(memory, ME: gl.constexpr, ring, v, due, used, weights):
    """Issue the product of a group's last weights, if there are any, with their values. Return
    (number of weights so far, whether the accumulator holds anything)."""
    scores = memory.scores.index(ME)
    sums = memory.sums.index(ME)
    weighed = memory.weighed.index(ME)
    if due:
        mbarrier.wait(weighed, weights & 1)
        room = weights_in(scores, ring.v_bufs.dtype, ring.BLOCK_N)
        tcgen05_mma(room, v, sums, use_acc=used)
        weights += 1
    return weights, used | due


@gluon.jit
def multiply(queries, ring, memory, orders, D: gl.constexpr, DV: gl.constexpr):
    """Issue all products in one order: for each step and group first the previous step's
    accumulation, then this step's scores."""
    BLOCK_N: gl.constexpr = ring.BLOCK_N
    order = gl.to_tensor(0)
    step = gl.to_tensor(0)
    filled = gl.to_tensor(0)
    weights_0 = gl.to_tensor(0)
    weights_1 = gl.to_tensor(0)
    kind_0, kind_1 = order_of_both(orders, order)
    while kind_0 == TILE:
        order += 1
        first_step = step
        due_0 = gl.to_tensor(False)
        due_1 = gl.to_tensor(False)
        used_0 = gl.to_tensor(False)
        used_1 = gl.to_tensor(False)
        kind_0, kind_1 = order_of_both(orders, order)
        while kind_0 < TILE:
            order += 1
            slot = step % ring.STAGES
            before = (step + ring.STAGES - 1) % ring.STAGES
            k = ring.k_bufs.index(slot).reshape([BLOCK_N, D]).permute((1, 0))
            v = ring.v_bufs.index(before).reshape([BLOCK_N, DV])
            mbarrier.wait(ring.k_full.index(slot), (step // ring.STAGES) & 1)
            if step > first_step:
                mbarrier.wait(ring.v_full.index(before), ((step - 1) // ring.STAGES) & 1)
            else:
                mbarrier.wait(queries.full.index(0), filled & 1)
            weights_0, used_0 = add_values(memory, 0, ring, v, due_0, used_0, weights_0)
            if kind_0 != NOTHING:
                q = queries.bufs.index(0).reshape([ROWS, D])
                tcgen05_mma(q, k, memory.scores.index(0), use_acc=False)
                tcgen05_commit(memory.done.index(0))
            if step == first_step:
                mbarrier.wait(queries.full.index(1), filled & 1)
            weights_1, used_1 = add_values(memory, 1, ring, v, due_1, used_1, weights_1)
            if step > first_step:
                tcgen05_commit(ring.v_empty.index(before))
            if kind_1 != NOTHING:
                q = queries.bufs.index(1).reshape([ROWS, D])
                tcgen05_mma(q, k, memory.scores.index(1), use_acc=False)
                tcgen05_commit(memory.done.index(1))
            tcgen05_commit(ring.k_empty.index(slot))
            due_0 = kind_0 != NOTHING
            due_1 = kind_1 != NOTHING
            step += 1
            kind_0, kind_1 = order_of_both(orders, order)
        if step > first_step:
            tcgen05_commit(queries.empty)
            filled += 1
            before = (step - 1) % ring.STAGES
            v = ring.v_bufs.index(before).reshape([BLOCK_N, DV])
            mbarrier.wait(ring.v_full.index(before), ((step - 1) // ring.STAGES) & 1)
            weights_0, used_0 = add_values(memory, 0, ring, v, due_0, used_0, weights_0)
            if used_0:
                tcgen05_commit(memory.summed.index(0))
            weights_1, used_1 = add_values(memory, 1, ring, v, due_1, used_1, weights_1)
            tcgen05_commit(ring.v_empty.index(before))
            if used_1:
                tcgen05_commit(memory.summed.index(1))


# The groups

@gluon.jit
def scale_sums(
    sums, alpha, DV: gl.constexpr, PIECE: gl.constexpr, LAYOUT: gl.constexpr,
):
    for column in gl.static_range(0, DV, PIECE):
        piece = sums.slice(column, PIECE)
        piece.store(piece.load(LAYOUT) * gl.expand_dims(alpha, 1))


@gluon.jit
def weigh(
    softmax, memory, order, dones, kind, inputs, call, MASKED: gl.constexpr, LAYOUT: gl.constexpr,
):
    """Return `GroupSoftmax` after one step of the online softmax, in powers of two. It passes over
    the scores twice, a piece at a time: a whole row would take half of the registers.

    Args:
        memory: `GroupMemory` of this group.
    """
    BLOCK_N: gl.constexpr = call.BLOCK_N
    PIECE: gl.constexpr = call.PIECE
    EVEN: gl.constexpr = call.EVEN
    WANT_MAX: gl.constexpr = call.results.WANT_MAX
    SCORE_MOD: gl.constexpr = call.mods.SCORE_MOD
    DTYPE: gl.constexpr = call.o_bufs.dtype
    scores = memory.scores
    sums = memory.sums
    shift_of_keys = call.mods.shifts[3]
    # Indices of keys include their shift.
    mods = StepMods(
        ints=call.mods.ints, floats=call.mods.floats, shifts=(0, 0, 0, 0), scale=call.mods.scale,
        READ_COLUMNS=None, SCORE_MOD=SCORE_MOD, MASK_SCORES=call.MASK_SCORES,
    )
    base = softmax.base
    row_max = softmax.row_max
    at = order % ORDERS * WORDS
    first = gl.to_tensor(0)
    end = gl.to_tensor(0)
    # Keys are numbered as mods see them. Otherwise compilers would add the shift to each column
    # before all loops, and registers can't hold the results.
    if MASKED or SCORE_MOD is not None:
        first = said(call.orders.words, at + 2) + shift_of_keys
    if MASKED and not EVEN:
        end = said(call.orders.words, at + 3) + shift_of_keys
    drop_order(call.orders, order)
    unit = unit_of_scores(mods.scale, SCORE_MOD)
    highest = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, LAYOUT))
    mbarrier.wait(memory.done, dones & 1)
    for column in gl.static_range(0, BLOCK_N, PIECE):
        piece = scores.slice(column, PIECE)
        found = piece.load(LAYOUT)
        if MASKED or SCORE_MOD is not None:
            found = scores_of_step(
                found, first + column, end, kind != ASKED, True, inputs,
                call.kv_length + shift_of_keys, mods, MASKED, EVEN, LAYOUT, PIECE,
            )
            piece.store(found)
        if WANT_MAX:
            highest = larger(highest, gl.reduce(found, 1, larger))
        else:
            highest = gl.maximum(highest, gl.max(found, 1))
    if WANT_MAX:
        row_max = larger(row_max, highest)
    else:
        row_max = gl.maximum(row_max, highest)
    highest = highest * unit
    # False where a score is NaN; then everything computed from base is NaN too.
    passed = highest > base + SLACK
    new_base = gl.where(passed, highest, base)
    # See `anyflex_triton.forward.forward_step`.
    shift = gl.where(new_base <= -FAR, 0.0, new_base)
    alpha = gl.exp2(base - shift)
    # At a row's first live pair the accumulator is 0 or unset, so nothing is rescaled.
    if gl.max((passed & (base != float("-inf"))).to(gl.int32), 0) > 0:
        scale_sums(sums, alpha, call.DV, PIECE, LAYOUT)
    row_sum = softmax.row_sum * alpha
    room = weights_in(scores, DTYPE, BLOCK_N)
    for column in gl.static_range(0, BLOCK_N, PIECE):
        found = scores.slice(column, PIECE).load(LAYOUT)
        weights = gl.exp2(found * unit - gl.expand_dims(shift, 1))
        row_sum += gl.sum(weights, 1)
        # The weights overwrite scores that were read already.
        room.slice(column, PIECE).store(weights.to(DTYPE))
    mbarrier.arrive(memory.weighed, count=1)
    return GroupSoftmax(base=new_base, row_max=row_max, row_sum=row_sum)


@gluon.jit
def attend(call, ME: gl.constexpr):
    """Compute the rows of all tiles that belong to group ME.

    Args:
        call: `GroupCall`.
    """
    DTYPE: gl.constexpr = call.o_bufs.dtype
    PIECE: gl.constexpr = call.PIECE
    SCORE_MOD: gl.constexpr = call.mods.SCORE_MOD
    # Each thread reads and writes one row of tensor memory.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, PIECE], [32, 1], [4, 1], [0, 1])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    orders = call.orders
    shifts = call.mods.shifts
    scale = call.mods.scale
    q_length = call.q_length
    memory = GroupMemory(
        scores=call.memory.scores.index(ME), sums=call.memory.sums.index(ME),
        done=call.memory.done.index(ME), weighed=call.memory.weighed.index(ME),
        summed=call.memory.summed.index(ME),
    )
    staged = call.o_bufs.index(ME)
    order = gl.to_tensor(0)
    dones = gl.to_tensor(0)
    filled = gl.to_tensor(0)
    order, kind = order_for(orders, order, ME)
    while kind == TILE:
        at = order % ORDERS * WORDS
        first_row = said(orders.words, at + 2) + ME * ROWS
        b = said(orders.words, at + 3)
        h = said(orders.words, at + 4)
        drop_order(orders, order)
        mod_b = b + shifts[0]
        mod_h = h + shifts[1]
        rows = first_row + gl.arange(0, ROWS, layout=OF_ROWS)
        q_idx = gl.expand_dims(gl.minimum(rows, q_length - 1), 1) + shifts[2]
        inputs = ModInputs(b=mod_b, h=mod_h, q_idx=q_idx, kv_idx=None, tables=call.tables)
        softmax = GroupSoftmax(
            base=gl.full([ROWS], float("-inf"), gl.float32, layout=OF_ROWS),
            row_max=gl.full([ROWS], float("-inf"), gl.float32, layout=OF_ROWS),
            row_sum=gl.full([ROWS], 0.0, gl.float32, layout=OF_ROWS),
        )
        first_done = dones
        order, kind = order_for(orders, order + 1, ME)
        if call.MASKED:
            while kind < PLAIN:
                softmax = weigh(softmax, memory, order, dones, kind, inputs, call, True, LAYOUT)
                dones += 1
                order, kind = order_for(orders, order + 1, ME)
        while kind == PLAIN:
            softmax = weigh(softmax, memory, order, dones, kind, inputs, call, False, LAYOUT)
            dones += 1
            order, kind = order_for(orders, order + 1, ME)
        row_max = softmax.row_max
        row_sum = softmax.row_sum
        # A row without a live pair has row_sum 0 and gives 0. NaN stays NaN.
        dead = (row_max == float("-inf")) & (row_sum == row_sum)
        whole = with_sinks(row_sum, row_max, softmax.base, h, call.results)
        inverse = gl.where(dead, 0.0, 1.0 / gl.where(dead, 1.0, whole))
        # Non-finite values also reach rows that don't see them: 0 * NaN is NaN.
        zeros = gl.full([ROWS], 0.0, gl.float32, layout=OF_ROWS)
        if dones > first_done:
            mbarrier.wait(memory.summed, filled & 1)
            filled += 1
            for column in gl.static_range(0, call.DV, PIECE):
                zeros += gl.sum(memory.sums.slice(column, PIECE).load(LAYOUT) * 0.0, 1)
        nans = (row_max != row_max).to(gl.int32)
        # The weights of far rows have lost their precision.
        unit = unit_of_scores(scale, SCORE_MOD)
        inexact = (zeros != zeros) | is_far(row_max, row_max * unit)
        # excess is how much base exceeds row_max.
        excess = gl.fma(row_max, 0.0 - unit, softmax.base)
        if gl.max(inexact.to(gl.int32), 0) > 0:
            row_max, row_sum, whole = write_nonfinite_rows(
                call.tensors, call.mask, call.mods, call.tables, call.results, b, h, first_row,
                q_length, call.kv_length, ROWS, OF_ROWS, 16,
            )
            excess = gl.full([ROWS], 0.0, gl.float32, layout=OF_ROWS)
        else:
            for column in gl.static_range(0, call.DV, PIECE):
                acc = memory.sums.slice(column, PIECE).load(LAYOUT) * gl.expand_dims(inverse, 1)
                # Without a step the accumulator is unset.
                acc = gl.where(gl.expand_dims(dead, 1), 0.0, acc)
                rounded = acc.to(DTYPE)
                # TMA may still read the previous contents of this buffer.
                tma.store_wait(0)
                staged.reshape([ROWS, PIECE]).store(rounded)
                fence_async_shared()
                store_box(call.o_desc, [b, h, first_row, column], staged)
                if call.tensors.WANT_REST:
                    # Rounding residual of out; backward's delta needs it.
                    lost = acc - rounded.to(gl.float32)
                    lost = gl.where(nonfinite(lost), 0.0, lost).to(DTYPE)
                    tma.store_wait(0)
                    staged.reshape([ROWS, PIECE]).store(lost)
                    fence_async_shared()
                    store_box(call.r_desc, [b, h, first_row, column], staged)
        place = gl.cast(b * call.heads + h, gl.int64) * q_length + rows
        write_row_sums(
            row_max, row_sum, whole, excess, nans, place, rows < q_length, scale, call.results,
        )
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, r_desc, query, key, value, out, rest, q_strides, k_strides,
    v_strides, o_strides, r_strides, tops, lse, max_scores, counter, offsets, ends, runs,
    mask_strides, tile_order, order_strides, ordered, tables, ints, floats, shifts, scale, sinks,
    batch_heads, heads, q_length, kv_length, tiles, head_group, SCORE_MOD: gl.constexpr,
    MASK_MOD: gl.constexpr, MASK_SCORES: gl.constexpr, HAS_MASK: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, GROUP: gl.constexpr, KV_SHARED: gl.constexpr,
    DIM: gl.constexpr, VALUE_DIM: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    WANT_LSE: gl.constexpr, WANT_MAX: gl.constexpr, WANT_REST: gl.constexpr, EVEN: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, PIECE: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):
    """Forward kernel: each program takes tiles of 256 query rows of one head until none are left.

    Args:
        q_desc, k_desc, v_desc, o_desc, r_desc: descriptors [B, H, rows, dims] of boxes of 128
            rows, D or DV columns, or of BLOCK_N; those of out and rest have PIECE columns. Without
            WANT_REST rest's arguments are None.
        query, key, value, out, rest: pointers for `write_nonfinite_rows`, with strides (b, h,
            row) in elements.
        counter: used where programs are fewer than tiles.
        Q_BLOCK: a multiple of 128.
    """
    ONE_ROW: gl.constexpr = mbarrier.MBarrierLayout()
    WORD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    MASKED: gl.constexpr = HAS_MASK or not EVEN
    S_MEMORY: gl.constexpr = TensorMemoryLayout((ROWS, BLOCK_N), col_stride=1)
    O_MEMORY: gl.constexpr = TensorMemoryLayout((ROWS, DV), col_stride=1)
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, ROWS, D], q_desc.layout)
    o_bufs = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, ROWS, PIECE], o_desc.layout)
    k_bufs = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_N, DV], v_desc.layout)
    scores = allocate_tensor_memory(gl.float32, [2, ROWS, BLOCK_N], S_MEMORY)
    sums = allocate_tensor_memory(gl.float32, [2, ROWS, DV], O_MEMORY)
    orders = gl.allocate_shared_memory(gl.int32, [ORDERS * WORDS, 1], WORD)
    order_full = gl.allocate_shared_memory(gl.int64, [ORDERS, 1], ONE_ROW)
    order_empty = gl.allocate_shared_memory(gl.int64, [ORDERS, 1], ONE_ROW)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], ONE_ROW)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], ONE_ROW)
    done = gl.allocate_shared_memory(gl.int64, [2, 1], ONE_ROW)
    weighed = gl.allocate_shared_memory(gl.int64, [2, 1], ONE_ROW)
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], ONE_ROW)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    for i in gl.static_range(ORDERS):
        mbarrier.init(order_full.index(i), count=1)
        # Arrivals: the multiplier and both groups.
        mbarrier.init(order_empty.index(i), count=3)
    for g in gl.static_range(2):
        mbarrier.init(q_full.index(g), count=1)
        mbarrier.init(done.index(g), count=1)
        mbarrier.init(weighed.index(g), count=1)
        mbarrier.init(summed.index(g), count=1)
    mbarrier.init(q_empty, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(v_empty.index(s), count=1)
    fence_async_shared()
    descs = LoadDescriptors(q=q_desc, k=k_desc, v=v_desc, D=D, DV=DV)
    queries = GroupQueries(bufs=q_bufs, full=q_full, empty=q_empty)
    ring = KeyRing(
        k_bufs=k_bufs, v_bufs=v_bufs, k_full=k_full, k_empty=k_empty, v_full=v_full,
        v_empty=v_empty, STAGES=STAGES, BLOCK_N=BLOCK_N,
    )
    memory = GroupMemory(scores=scores, sums=sums, done=done, weighed=weighed, summed=summed)
    order_ring = OrderRing(words=orders, full=order_full, empty=order_empty)
    mask = MaskRuns(
        offsets=offsets, ends=ends, runs=runs, strides=mask_strides, HAS_MASK=HAS_MASK,
        Q_BLOCK=Q_BLOCK, KV_BLOCK=KV_BLOCK,
    )
    schedule = TileSchedule(
        counter=counter, tile_order=tile_order, order_strides=order_strides, ordered=ordered,
        batch_heads=batch_heads, heads=heads, tiles=tiles, head_group=head_group, GROUP=GROUP,
        KV_SHARED=KV_SHARED, DYNAMIC=True,
    )
    call = GroupCall(
        o_desc=o_desc, r_desc=r_desc, o_bufs=o_bufs, memory=memory, orders=order_ring,
        tensors=PointedTensors(
            query=query, key=key, value=value, out=out, rest=rest, q_strides=q_strides,
            k_strides=k_strides, v_strides=v_strides, o_strides=o_strides, r_strides=r_strides,
            GROUP=GROUP, KV_SHARED=KV_SHARED, DIM=DIM, VALUE_DIM=VALUE_DIM, WANT_REST=WANT_REST,
        ),
        mask=mask,
        results=RowResults(
            tops=tops, lse=lse, max_scores=max_scores, SCORED=SCORE_MOD is not None,
            WANT_LSE=WANT_LSE, WANT_MAX=WANT_MAX, WANT_TOPS=WANT_REST, sinks=sinks,
        ),
        tables=tables,
        mods=Mods(
            ints=ints, floats=floats, shifts=shifts, scale=scale, READ=None, SCORE_MOD=SCORE_MOD,
            MASK_MOD=MASK_MOD,
        ),
        heads=heads, q_length=q_length, kv_length=kv_length, MASK_SCORES=MASK_SCORES, DV=DV,
        EVEN=EVEN, MASKED=MASKED, BLOCK_N=BLOCK_N, PIECE=PIECE,
    )
    # Spelled out: constexprs stop being constexpr when they pass through a named tuple.
    gl.warp_specialize([
        (attend, (call, 0)),
        (attend, (call, 1)),
        (multiply, (queries, ring, memory, order_ring, D, DV)),
        (produce, (
            descs, queries, ring, order_ring, mask, schedule, q_length, kv_length, MASKED,
        )),
    ], [4, 1, 1], [GROUP_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS])
