"""Attention forward on Blackwell (sm_100): a warp that loads, a warp that multiplies, and two
warpgroups that weigh, in one program.

A tile is 256 query rows, 128 for each warpgroup. The producer takes tiles one after the other,
merges the runs of both halves' rows of the block mask, has TMA load queries, keys and values, and
says in a ring of orders what it loads and for whom. The multiplier has the tensor cores make
scores in tensor memory, and add values' sums there; a group reads its scores, a row a thread,
stores their weights over them, and reads its sums at the tile's end (FlashAttention-4's division
of the work, but that a group scales its sums itself). While one group weighs, the other's products
run.

All products are of one warp, and the tensor cores run them in the order in which it issues them.
So a group's next scores may follow the product that reads the weights they overwrite, and who
waits for scores has also waited for the sums of the step before. No barrier is two phases ahead of
who waits for it: a group's next scores take its last weights, its next tile's sums take weights of
that tile, and where it has no step in a tile, nobody speaks of sums.
"""

from __future__ import annotations

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

from anyflex_cuda.largest import larger
from anyflex_cuda.memory_views import reinterpret
from anyflex_cuda.row_sums import write_row_sums
from anyflex_cuda.spoken_words import WORDS, said, say
from anyflex_cuda.step_scores import scores_of_step
from anyflex_cuda.strange_values import write_strange_rows
from anyflex_triton.device_functions import (
    FAR,
    FULL,
    is_far,
    mask_row,
    strange,
    tile_of_program,
    unit_of_scores,
)

__all__ = ["ROWS", "forward_kernel"]

# Triton 3.8 has new names for them.
_load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# Argument lists would be a line an argument.
# fmt: off

ROWS = gl.constexpr(128)
"""Of a group: the rows of tensor memory, a thread each."""
ORDERS = gl.constexpr(8)
"""So many are said ahead."""
SLACK = gl.constexpr(8.0)
"""Powers of two by which scores may pass what weights are counted from, before sums are scaled."""
BEHIND = gl.constexpr(0x3FFFFFFF)
"""Behind all keys."""

# What an order says to a group.
NOTHING = gl.constexpr(0)
ASKED = gl.constexpr(1)
"""A step whose pairs the mask mod tells."""
COVERED = gl.constexpr(2)
"""A step of live pairs up to its end."""
PLAIN = gl.constexpr(3)
"""A step of live pairs."""
TILE = gl.constexpr(4)
"""The tile before has no more steps, another one begins."""
STOP = gl.constexpr(5)
"""The tile before has no more steps, and was the last."""


# Orders

@gluon.jit
def give_order(
    orders, order_full, order_empty, order, kind_0, kind_1, x, y, z,
):
    """In the producer, of a step: first key, end; of a tile: first row, b, h."""
    slot = order % ORDERS
    mbarrier.wait(order_empty.index(slot), ((order // ORDERS) & 1) ^ 1)
    say(orders, slot * WORDS, kind_0)
    say(orders, slot * WORDS + 1, kind_1)
    say(orders, slot * WORDS + 2, x)
    say(orders, slot * WORDS + 3, y)
    say(orders, slot * WORDS + 4, z)
    mbarrier.arrive(order_full.index(slot), count=1)


@gluon.jit
def drop_order(order_empty, order):
    """Nobody here reads it any more."""
    mbarrier.arrive(order_empty.index(order % ORDERS), count=1)


@gluon.jit
def order_for(orders, order_full, order_empty, order, ME: gl.constexpr):
    """(order, kind) of group ME's next, from `order` on."""
    mbarrier.wait(order_full.index(order % ORDERS), (order // ORDERS) & 1)
    kind = said(orders, order % ORDERS * WORDS + ME)
    while kind == NOTHING:
        drop_order(order_empty, order)
        order += 1
        mbarrier.wait(order_full.index(order % ORDERS), (order // ORDERS) & 1)
        kind = said(orders, order % ORDERS * WORDS + ME)
    return order, kind


# The producer

@gluon.jit
def run_at(runs, run, last_run, kv_length, KV_BLOCK: gl.constexpr, HAS_MASK: gl.constexpr):
    """(begin, end, 1 if FULL) of a run in keys; BEHIND where there is none."""
    there = run < last_run
    if HAS_MASK:
        at = runs + run * 3
        begin = gl.load(at, mask=there, other=0) * KV_BLOCK
        end = gl.minimum(gl.load(at + 1, mask=there, other=0) * KV_BLOCK, kv_length)
        full = gl.where(gl.load(at + 2, mask=there, other=0) == FULL, 1, 0)
        return gl.where(there, begin, BEHIND), gl.where(there, end, BEHIND), full
    else:
        return gl.where(there, 0, BEHIND), gl.where(there, kv_length, BEHIND), gl.where(there, 1,
        0)


@gluon.jit
def kind_of(inside, full, PART: gl.constexpr):
    """What a group does in steps of a part."""
    if PART == 0:
        return gl.where(inside, gl.where(full == 1, COVERED, ASKED), NOTHING)
    else:
        return gl.where(inside, PLAIN, NOTHING)


@gluon.jit
def load_step(
    q_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty, v_full,
    v_empty, step, first_step, filled, b, h, kv_b, kv_head, first_row, first,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
):
    """Keys and values of a step. A tile's queries come between those of its first step: there is
    room for keys earlier."""
    slot = step % STAGES
    phase = ((step // STAGES) & 1) ^ 1
    mbarrier.wait(k_empty.index(slot), phase)
    mbarrier.expect(k_full.index(slot), BLOCK_N * D * 2)
    _load_box(k_desc, [kv_b, kv_head, first, 0], k_full.index(slot), k_bufs.index(slot))
    if step == first_step:
        mbarrier.wait(q_empty, (filled & 1) ^ 1)
        for g in gl.static_range(2):
            mbarrier.expect(q_full.index(g), ROWS * D * 2)
            _load_box(q_desc, [b, h, first_row + g * ROWS, 0], q_full.index(g), q_bufs.index(g))
    mbarrier.wait(v_empty.index(slot), phase)
    mbarrier.expect(v_full.index(slot), BLOCK_N * DV * 2)
    _load_box(v_desc, [kv_b, kv_head, first, 0], v_full.index(slot), v_bufs.index(slot))


@gluon.jit
def load_steps(
    q_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty, v_full,
    v_empty, orders, order_full, order_empty, runs, order, step, first_step, filled, b, h, kv_b,
    kv_head, first_row, run_0, last_0, run_1, last_1, kv_length, PART: gl.constexpr,
    HAS_MASK: gl.constexpr, KV_BLOCK: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr,
):
    """(order, step) after a tile's steps that may have dead pairs, PART 0, or that have none, 1.

    Both groups' runs are cut where one of them begins or ends: between two cuts each group has the
    same kind of pairs, or nothing to do.
    """
    begin_0, end_0, full_0 = run_at(runs, run_0, last_0, kv_length, KV_BLOCK, HAS_MASK)
    begin_1, end_1, full_1 = run_at(runs, run_1, last_1, kv_length, KV_BLOCK, HAS_MASK)
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
                orders, order_full, order_empty, order, kind_of(inside_0, full_0, PART),
                kind_of(inside_1, full_1, PART), key, end, 0,
            )
            load_step(
                q_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty,
                v_full, v_empty, step, first_step, filled, b, h, kv_b, kv_head, first_row, key,
                STAGES, BLOCK_N, D, DV,
            )
            order += 1
            step += 1
        if inside_0:
            begin_0 = stop
            if stop == end_0:
                run_0 += 1
                begin_0, end_0, full_0 = run_at(runs, run_0, last_0, kv_length, KV_BLOCK, HAS_MASK)
        if inside_1:
            begin_1 = stop
            if stop == end_1:
                run_1 += 1
                begin_1, end_1, full_1 = run_at(runs, run_1, last_1, kv_length, KV_BLOCK, HAS_MASK)
        cut = gl.minimum(begin_0, begin_1)
    return order, step


@gluon.jit
def runs_of(
    offsets, ends, mask_strides, b, h, first_row, q_length, HAS_MASK: gl.constexpr,
    Q_BLOCK: gl.constexpr,
):
    """(first, end) of a group's runs: none where it has no row."""
    if HAS_MASK:
        run = gl.to_tensor(0)
        last_run = gl.to_tensor(0)
        if first_row < q_length:
            run, last_run = mask_row(offsets, ends, mask_strides, b, h, first_row // Q_BLOCK)
        return run, last_run
    else:
        return gl.to_tensor(0), gl.where(first_row < q_length, 1, 0)


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty, v_full,
    v_empty, orders, order_full, order_empty, counter, offsets, ends, runs, mask_strides,
    tile_order, order_strides, ordered, batch_heads, heads, q_length, kv_length, tiles, head_group,
    HAS_MASK: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, GROUP: gl.constexpr,
    KV_SHARED: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, MASKED: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):
    order = gl.to_tensor(0)
    step = gl.to_tensor(0)
    filled = gl.to_tensor(0)
    count = tiles * batch_heads
    at = gl.program_id(0)
    while at < count:
        following = count
        if gl.num_programs(0) < count:
            # Asked for early: the answer takes as long as a step.
            following = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        tile, bh = tile_of_program(at, tiles, batch_heads, head_group)
        b = bh // heads
        h = bh % heads
        kv_head = h // GROUP
        kv_b = 0 * b if KV_SHARED else b
        if HAS_MASK:  # noqa: SIM102  the other is known at run time alone
            if ordered:
                tile = gl.load(tile_order + b * order_strides[0] + h * order_strides[1] + tile)
        first_row = tile * (2 * ROWS)
        give_order(orders, order_full, order_empty, order, TILE, TILE, first_row, b, h)
        order += 1
        run_0, last_0 = runs_of(
            offsets, ends, mask_strides, b, h, first_row, q_length, HAS_MASK, Q_BLOCK,
        )
        run_1, last_1 = runs_of(
            offsets, ends, mask_strides, b, h, first_row + ROWS, q_length, HAS_MASK, Q_BLOCK,
        )
        first_step = step
        if MASKED:
            order, step = load_steps(
                q_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty,
                v_full, v_empty, orders, order_full, order_empty, runs, order, step, first_step,
                filled, b, h, kv_b, kv_head, first_row, run_0, last_0, run_1, last_1, kv_length, 0,
                HAS_MASK, KV_BLOCK, STAGES, BLOCK_N, D, DV,
            )
        order, step = load_steps(
            q_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty,
            v_full, v_empty, orders, order_full, order_empty, runs, order, step, first_step,
            filled, b, h, kv_b, kv_head, first_row, run_0, last_0, run_1, last_1, kv_length, 1,
            HAS_MASK, KV_BLOCK, STAGES, BLOCK_N, D, DV,
        )
        if step > first_step:
            filled += 1
        at = following
    give_order(orders, order_full, order_empty, order, STOP, STOP, 0, 0, 0)


# The multiplier

@gluon.jit
def order_of_both(orders, order_full, order_empty, order):
    """Both groups' kinds of the next order, which is dropped."""
    mbarrier.wait(order_full.index(order % ORDERS), (order // ORDERS) & 1)
    kind_0 = said(orders, order % ORDERS * WORDS, 1)
    kind_1 = said(orders, order % ORDERS * WORDS + 1, 1)
    drop_order(order_empty, order)
    return kind_0, kind_1


@gluon.jit
def weights_in(scores, DTYPE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Room for a group's weights, over its scores."""
    LAYOUT: gl.constexpr = TensorMemoryLayout((ROWS, BLOCK_N), col_stride=1)
    halves = reinterpret(scores, DTYPE, [ROWS, BLOCK_N * 2], LAYOUT)
    return halves.slice(0, BLOCK_N)


@gluon.jit
def add_values(
    scores, sums, v, weighed, due, used, weights, DTYPE: gl.constexpr, BLOCK_N: gl.constexpr,
):
    """(weights so far, whether there are sums) after the product of a group's last weights, if it
    had any, and their values."""
    if due:
        mbarrier.wait(weighed, weights & 1)
        tcgen05_mma(weights_in(scores, DTYPE, BLOCK_N), v, sums, use_acc=used)
        weights += 1
    return weights, used | due


@gluon.jit
def multiply(
    q_bufs, k_bufs, v_bufs, scores, sums, q_full, q_empty, k_full, k_empty, v_full, v_empty, done,
    weighed, summed, orders, order_full, order_empty, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr,
):
    """All products, in one order: of each step and group first its sums of the step before, then
    its scores."""
    DTYPE: gl.constexpr = v_bufs.dtype
    order = gl.to_tensor(0)
    step = gl.to_tensor(0)
    filled = gl.to_tensor(0)
    weights_0 = gl.to_tensor(0)
    weights_1 = gl.to_tensor(0)
    kind_0, kind_1 = order_of_both(orders, order_full, order_empty, order)
    while kind_0 == TILE:
        order += 1
        first_step = step
        due_0 = gl.to_tensor(False)
        due_1 = gl.to_tensor(False)
        used_0 = gl.to_tensor(False)
        used_1 = gl.to_tensor(False)
        kind_0, kind_1 = order_of_both(orders, order_full, order_empty, order)
        while kind_0 < TILE:
            order += 1
            slot = step % STAGES
            before = (step + STAGES - 1) % STAGES
            k = k_bufs.index(slot).reshape([BLOCK_N, D]).permute((1, 0))
            v = v_bufs.index(before).reshape([BLOCK_N, DV])
            mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
            if step > first_step:
                mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
            else:
                mbarrier.wait(q_full.index(0), filled & 1)
            weights_0, used_0 = add_values(
                scores.index(0), sums.index(0), v, weighed.index(0), due_0, used_0, weights_0,
                DTYPE, BLOCK_N,
            )
            if kind_0 != NOTHING:
                q = q_bufs.index(0).reshape([ROWS, D])
                tcgen05_mma(q, k, scores.index(0), use_acc=False)
                tcgen05_commit(done.index(0))
            if step == first_step:
                mbarrier.wait(q_full.index(1), filled & 1)
            weights_1, used_1 = add_values(
                scores.index(1), sums.index(1), v, weighed.index(1), due_1, used_1, weights_1,
                DTYPE, BLOCK_N,
            )
            if step > first_step:
                tcgen05_commit(v_empty.index(before))
            if kind_1 != NOTHING:
                q = q_bufs.index(1).reshape([ROWS, D])
                tcgen05_mma(q, k, scores.index(1), use_acc=False)
                tcgen05_commit(done.index(1))
            tcgen05_commit(k_empty.index(slot))
            due_0 = kind_0 != NOTHING
            due_1 = kind_1 != NOTHING
            step += 1
            kind_0, kind_1 = order_of_both(orders, order_full, order_empty, order)
        if step > first_step:
            tcgen05_commit(q_empty)
            filled += 1
            before = (step - 1) % STAGES
            v = v_bufs.index(before).reshape([BLOCK_N, DV])
            mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
            weights_0, used_0 = add_values(
                scores.index(0), sums.index(0), v, weighed.index(0), due_0, used_0, weights_0,
                DTYPE, BLOCK_N,
            )
            if used_0:
                tcgen05_commit(summed.index(0))
            weights_1, used_1 = add_values(
                scores.index(1), sums.index(1), v, weighed.index(1), due_1, used_1, weights_1,
                DTYPE, BLOCK_N,
            )
            tcgen05_commit(v_empty.index(before))
            if used_1:
                tcgen05_commit(summed.index(1))


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
    scores, sums, done, weighed, orders, order_empty, order, dones, kind, base, total, top,
    b, h, q_idx, kv_length, shifts, tables, ints, floats, scale, MASKED: gl.constexpr,
    EVEN: gl.constexpr, SCORE_MOD: gl.constexpr, MASK_SCORES: gl.constexpr, WANT_MAX: gl.constexpr,
    LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, PIECE: gl.constexpr, DV: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """(base, total, top) after a step: one of an online softmax, in powers of two. Twice
    over the scores, a piece at a time: all of a row's at once would take half of the registers.

    Args:
        base: what weights are counted from, in powers of two: not above the largest score so far,
            nor more than SLACK below.
        top: the largest score so far; where WANT_MAX, NaN if one was.
    """
    at = order % ORDERS * WORDS
    first = gl.to_tensor(0)
    end = gl.to_tensor(0)
    # Counted as mods count: else each column's place with that shift would be made before all
    # loops, and there is no room to keep so many.
    if MASKED or SCORE_MOD is not None:
        first = said(orders, at + 2) + shifts[3]
    if MASKED and not EVEN:
        end = said(orders, at + 3) + shifts[3]
    drop_order(order_empty, order)
    unit = unit_of_scores(scale, SCORE_MOD)
    highest = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, LAYOUT))
    mbarrier.wait(done, dones & 1)
    for column in gl.static_range(0, BLOCK_N, PIECE):
        piece = scores.slice(column, PIECE)
        found = piece.load(LAYOUT)
        if MASKED or SCORE_MOD is not None:
            found = scores_of_step(
                found, first + column, end, kind != ASKED, True, b, h, q_idx,
                kv_length + shifts[3], (0, 0, 0, 0), tables, ints, floats, scale, MASKED, EVEN,
                SCORE_MOD, MASK_SCORES, LAYOUT, PIECE,
            )
            piece.store(found)
        if WANT_MAX:
            highest = larger(highest, gl.reduce(found, 1, larger))
        else:
            highest = gl.maximum(highest, gl.max(found, 1))
    if WANT_MAX:
        top = larger(top, highest)
    else:
        top = gl.maximum(top, highest)
    highest = highest * unit
    # False where a score is NaN: then all that is made of base is, too.
    passed = highest > base + SLACK
    new_base = gl.where(passed, highest, base)
    # As in `anyflex_triton.forward.forward_step`.
    shift = gl.where(new_base <= -FAR, 0.0, new_base)
    alpha = gl.exp2(base - shift)
    # A row's first live pair finds sums of 0, or none.
    if gl.max((passed & (base != float("-inf"))).to(gl.int32), 0) > 0:
        scale_sums(sums, alpha, DV, PIECE, LAYOUT)
    total = total * alpha
    room = weights_in(scores, DTYPE, BLOCK_N)
    for column in gl.static_range(0, BLOCK_N, PIECE):
        found = scores.slice(column, PIECE).load(LAYOUT)
        weights = gl.exp2(found * unit - gl.expand_dims(shift, 1))
        total += gl.sum(weights, 1)
        # Over scores that were read.
        room.slice(column, PIECE).store(weights.to(DTYPE))
    mbarrier.arrive(weighed, count=1)
    return new_base, total, top


@gluon.jit
def attend(
    o_desc, r_desc, o_bufs, scores, sums, done, weighed, summed, orders, order_full, order_empty,
    query, key, value, out, rest, q_strides, k_strides, v_strides, o_strides, r_strides, offsets,
    ends, runs, mask_strides, tops, lse, max_scores, tables, ints, floats, shifts, scale, heads,
    q_length, kv_length, ME: gl.constexpr, SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr,
    MASK_SCORES: gl.constexpr, HAS_MASK: gl.constexpr, Q_BLOCK: gl.constexpr,
    KV_BLOCK: gl.constexpr, GROUP: gl.constexpr, KV_SHARED: gl.constexpr, DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr, DV: gl.constexpr, WANT_LSE: gl.constexpr, WANT_MAX: gl.constexpr,
    WANT_REST: gl.constexpr, EVEN: gl.constexpr, MASKED: gl.constexpr, BLOCK_N: gl.constexpr,
    PIECE: gl.constexpr,
):
    """All tiles' rows of group ME.

    Args:
        MASKED: whether any step may have dead pairs.
    """
    DTYPE: gl.constexpr = o_bufs.dtype
    # How tensor memory is read and written: a row a thread.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, PIECE], [32, 1], [4, 1], [0, 1])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    scores = scores.index(ME)
    sums = sums.index(ME)
    done = done.index(ME)
    weighed = weighed.index(ME)
    summed = summed.index(ME)
    staged = o_bufs.index(ME)
    order = gl.to_tensor(0)
    dones = gl.to_tensor(0)
    filled = gl.to_tensor(0)
    order, kind = order_for(orders, order_full, order_empty, order, ME)
    while kind == TILE:
        at = order % ORDERS * WORDS
        first_row = said(orders, at + 2) + ME * ROWS
        b = said(orders, at + 3)
        h = said(orders, at + 4)
        drop_order(order_empty, order)
        mod_b = b + shifts[0]
        mod_h = h + shifts[1]
        rows = first_row + gl.arange(0, ROWS, layout=OF_ROWS)
        q_idx = gl.expand_dims(gl.minimum(rows, q_length - 1), 1) + shifts[2]
        base = gl.full([ROWS], float("-inf"), gl.float32, layout=OF_ROWS)
        top = gl.full([ROWS], float("-inf"), gl.float32, layout=OF_ROWS)
        total = gl.full([ROWS], 0.0, gl.float32, layout=OF_ROWS)
        first_done = dones
        order, kind = order_for(orders, order_full, order_empty, order + 1, ME)
        if MASKED:
            while kind < PLAIN:
                base, total, top = weigh(
                    scores, sums, done, weighed, orders, order_empty, order, dones, kind, base,
                    total, top, mod_b, mod_h, q_idx, kv_length, shifts, tables, ints, floats,
                    scale, True, EVEN, SCORE_MOD, MASK_SCORES, WANT_MAX, LAYOUT, BLOCK_N, PIECE,
                    DV, DTYPE,
                )
                dones += 1
                order, kind = order_for(orders, order_full, order_empty, order + 1, ME)
        while kind == PLAIN:
            base, total, top = weigh(
                scores, sums, done, weighed, orders, order_empty, order, dones, kind, base, total,
                top, mod_b, mod_h, q_idx, kv_length, shifts, tables, ints, floats, scale,
                False, EVEN, SCORE_MOD, MASK_SCORES, WANT_MAX, LAYOUT, BLOCK_N, PIECE, DV, DTYPE,
            )
            dones += 1
            order, kind = order_for(orders, order_full, order_empty, order + 1, ME)
        # A row without a live pair has 0 here, and gives 0. NaN stays.
        dead = (top == float("-inf")) & (total == total)
        inverse = gl.where(dead, 0.0, 1.0 / gl.where(dead, 1.0, total))
        # A value that isn't finite has reached rows that don't see it too: 0 * NaN is NaN.
        odd = gl.full([ROWS], 0.0, gl.float32, layout=OF_ROWS)
        if dones > first_done:
            mbarrier.wait(summed, filled & 1)
            filled += 1
            for column in gl.static_range(0, DV, PIECE):
                odd += gl.sum(sums.slice(column, PIECE).load(LAYOUT) * 0.0, 1)
        nans = (top != top).to(gl.int32)
        # Weights of far rows are none.
        unit = unit_of_scores(scale, SCORE_MOD)
        odd = (odd != odd) | is_far(top, top * unit)
        # How much higher the base is.
        excess = gl.fma(top, 0.0 - unit, base)
        if gl.max(odd.to(gl.int32), 0) > 0:
            top, total = write_strange_rows(
                query, key, value, out, rest, q_strides, k_strides, v_strides, o_strides,
                r_strides, offsets, ends, runs, mask_strides, b, h, first_row, q_length, kv_length,
                tables, ints, floats, shifts, scale, SCORE_MOD, MASK_MOD, HAS_MASK, Q_BLOCK,
                KV_BLOCK, GROUP, KV_SHARED, DIM, VALUE_DIM, ROWS, WANT_REST, OF_ROWS, 16,
            )
            excess = gl.full([ROWS], 0.0, gl.float32, layout=OF_ROWS)
        else:
            for column in gl.static_range(0, DV, PIECE):
                acc = sums.slice(column, PIECE).load(LAYOUT) * gl.expand_dims(inverse, 1)
                # Where no step was, there are no sums.
                acc = gl.where(gl.expand_dims(dead, 1), 0.0, acc)
                rounded = acc.to(DTYPE)
                # What was there before may still be read.
                tma.store_wait(0)
                staged.reshape([ROWS, PIECE]).store(rounded)
                fence_async_shared()
                _store_box(o_desc, [b, h, first_row, column], staged)
                if WANT_REST:
                    # What rounding takes from out, and delta needs.
                    lost = acc - rounded.to(gl.float32)
                    lost = gl.where(strange(lost), 0.0, lost).to(DTYPE)
                    tma.store_wait(0)
                    staged.reshape([ROWS, PIECE]).store(lost)
                    fence_async_shared()
                    _store_box(r_desc, [b, h, first_row, column], staged)
        place = gl.cast(b * heads + h, gl.int64) * q_length + rows
        write_row_sums(
            top, total, excess, nans, tops, lse, max_scores, place, rows < q_length, scale,
            SCORE_MOD is not None, WANT_LSE, WANT_MAX, WANT_REST,
        )
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, r_desc, query, key, value, out, rest, q_strides, k_strides,
    v_strides, o_strides, r_strides, tops, lse, max_scores, counter, offsets, ends, runs,
    mask_strides, tile_order, order_strides, ordered, tables, ints, floats, shifts, scale,
    batch_heads, heads, q_length, kv_length, tiles, head_group, SCORE_MOD: gl.constexpr,
    MASK_MOD: gl.constexpr, MASK_SCORES: gl.constexpr, HAS_MASK: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, GROUP: gl.constexpr, KV_SHARED: gl.constexpr,
    DIM: gl.constexpr, VALUE_DIM: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    WANT_LSE: gl.constexpr, WANT_MAX: gl.constexpr, WANT_REST: gl.constexpr, EVEN: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, PIECE: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):
    """Programs that take tiles of 256 query rows of one head until there are no more.

    Args:
        q_desc, k_desc, v_desc, o_desc, r_desc: descriptors [B, H, rows, dims] of query, key,
            value, out and rest; boxes of 128 rows, D or DV columns, or of BLOCK_N; those of out
            and rest of PIECE columns. Of rest nothing is there without WANT_REST.
        query, key, value, out, rest: for `write_strange_rows`, with strides (b, h, row); DIM and
            VALUE_DIM are their columns.
        tops: [B, Hq, L, 2], float32, where WANT_REST, as `anyflex_triton.forward`'s.
        lse, max_scores: [B, Hq, L], float32.
        counter: int32, zero at first: tiles that were taken beyond each program's first. Read
            where programs are fewer than tiles.
        tile_order, order_strides, ordered: as Hopper's.
        offsets, ends, runs, mask_strides, tables, ints, floats, shifts, scale, batch_heads, heads,
            tiles, head_group: as `anyflex_triton.forward`'s.
        Q_BLOCK, KV_BLOCK: the mask's; Q_BLOCK is a multiple of 128.
        EVEN: kv_length, and KV_BLOCK, are multiples of BLOCK_N.
        PIECE: columns of scores, sums or out that a thread has at a time.
        GROUP_REGISTERS, OTHER_REGISTERS: of a thread of a group, and of the two other warps.
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
        # The multiplier and both groups.
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
    # Tuples with a name would lose their constants.
    gl.warp_specialize([
        (attend, (
            o_desc, r_desc, o_bufs, scores, sums, done, weighed, summed, orders, order_full,
            order_empty, query, key, value, out, rest, q_strides, k_strides, v_strides, o_strides,
            r_strides, offsets, ends, runs, mask_strides, tops, lse, max_scores, tables, ints,
            floats, shifts, scale, heads, q_length, kv_length, 0, SCORE_MOD, MASK_MOD,
            MASK_SCORES, HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP, KV_SHARED, DIM, VALUE_DIM, DV,
            WANT_LSE, WANT_MAX, WANT_REST, EVEN, MASKED, BLOCK_N, PIECE,
        )),
        (attend, (
            o_desc, r_desc, o_bufs, scores, sums, done, weighed, summed, orders, order_full,
            order_empty, query, key, value, out, rest, q_strides, k_strides, v_strides, o_strides,
            r_strides, offsets, ends, runs, mask_strides, tops, lse, max_scores, tables, ints,
            floats, shifts, scale, heads, q_length, kv_length, 1, SCORE_MOD, MASK_MOD,
            MASK_SCORES, HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP, KV_SHARED, DIM, VALUE_DIM, DV,
            WANT_LSE, WANT_MAX, WANT_REST, EVEN, MASKED, BLOCK_N, PIECE,
        )),
        (multiply, (
            q_bufs, k_bufs, v_bufs, scores, sums, q_full, q_empty, k_full, k_empty, v_full,
            v_empty, done, weighed, summed, orders, order_full, order_empty, STAGES, BLOCK_N, D,
            DV,
        )),
        (produce, (
            q_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty,
            v_full, v_empty, orders, order_full, order_empty, counter, offsets, ends, runs,
            mask_strides, tile_order, order_strides, ordered, batch_heads, heads, q_length,
            kv_length, tiles, head_group, HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP, KV_SHARED, D, DV,
            MASKED, STAGES, BLOCK_N,
        )),
    ], [4, 1, 1], [GROUP_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS])
