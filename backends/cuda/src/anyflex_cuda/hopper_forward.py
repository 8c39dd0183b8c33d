"""Attention forward on Hopper: a warp that loads, and warpgroups that compute, in one program.

The producer takes tiles of query rows, one after the other, reads their rows of the block mask and
has TMA load queries, keys and values into shared memory. It says there too what it loads, so that
the consumers never read the mask: a tile's place and its counts of steps beside its queries, a
step's keys beside the keys. Each consumer keeps 64 rows of the tile in registers: the product of a
step's scores runs while the weights of the step before meet their values (FlashAttention-3: Shah
et al., 2024), and the softmax of one consumer while the other's products run.

Descriptors, buffers and sums are tuples of parts: see `tile_parts`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anyflex_cuda.rescaling import rescaled
from anyflex_cuda.row_sums import write_row_sums
from anyflex_cuda.spoken_words import WORDS, said, say
from anyflex_cuda.step_scores import scores_of_step
from anyflex_cuda.strange_values import write_strange_rows
from anyflex_cuda.tile_parts import (
    ROWS,
    awaited,
    buffers,
    descriptors,
    layout_of_products,
    load_parts,
    place_parts,
    products_of_values,
    store_parts,
    zeros_of,
)
from anyflex_triton.device_functions import (
    FAR,
    FULL,
    bounded_run,
    is_far,
    mask_row,
    tile_of_program,
    unit_of_scores,
)

__all__ = ["forward_kernel"]

# Argument lists would be a line an argument.
# fmt: off

QUARTERS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]], lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 4],
    )
)
"""Four threads share two rows of a product: [ROWS, 4], one element a row and thread."""


@gluon.jit
def pin(x):
    """x, a sum of exponentials, whose making stays before the next wait: ptxas would move a
    softmax behind the wait for products that it could run beside. What never happens, but might
    depend on x, it leaves in its place: a sum is never this negative NaN."""
    never: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 a; mov.u32 a, 0; setp.eq.u32 p, $1, 0xffc0dead; "
        "@p st.volatile.shared.b32 [a], $1; mov.b32 $0, $1; }"
    )
    return gl.inline_asm_elementwise(
        never, "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1,
    )


@gluon.jit
def handed_over(weights, dtype: gl.constexpr, LAYOUT: gl.constexpr, APART: gl.constexpr):
    """Weights as they are handed to the next step: halves, or, where that may be another loop's
    (APART), words of two: halves ptxas would take apart and put together in each step.

    Args:
        dtype: of values; LAYOUT: of their products.
    """
    if APART:
        low, high = gl.split(weights.reshape([ROWS, weights.shape[1] // 2, 2]))
        two: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
        rounding: gl.constexpr = "cvt.rn." + two + ".f32 $0, $2, $1;"
        return gl.inline_asm_elementwise(
            rounding, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1,
        )
    else:
        return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def operand_of(handed, dtype: gl.constexpr, LAYOUT: gl.constexpr, APART: gl.constexpr):
    """What `handed_over` returned, as a product takes it."""
    if APART:
        low = handed.to(gl.int16).to(dtype, bitcast=True)
        high = (handed >> 16).to(gl.int16).to(dtype, bitcast=True)
        both = gl.join(low, high).reshape([ROWS, handed.shape[1] * 2])
        return gl.convert_layout(
            both, gl.DotOperandLayout(0, LAYOUT, 2), assert_trivial=True,
        )
    else:
        return handed


# The producer

@gluon.jit
def count_steps(
    runs, run, last_run, kv_length, KV_BLOCK: gl.constexpr, HAS_MASK: gl.constexpr,
    EVEN: gl.constexpr, BLOCK_N: gl.constexpr,
):
    """(steps that may have dead pairs, steps that have none) of a row of runs."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    if HAS_MASK:
        masked = gl.to_tensor(0)
        plain = gl.to_tensor(0)
        for first in range(run, last_run, 32):
            index = first + gl.arange(0, 32, layout=LAYOUT)
            there = index < last_run
            begin = gl.load(runs + index * 3, mask=there, other=0) * KV_BLOCK
            end = gl.load(runs + index * 3 + 1, mask=there, other=0) * KV_BLOCK
            full = gl.load(runs + index * 3 + 2, mask=there, other=0) == FULL
            length = gl.minimum(end, kv_length) - begin
            whole = gl.where(full, length // BLOCK_N, 0)
            plain += gl.sum(whole, 0)
            masked += gl.sum((length + BLOCK_N - 1) // BLOCK_N - whole, 0)
        return masked, plain
    elif EVEN:
        return gl.to_tensor(0), kv_length // BLOCK_N
    else:
        plain = kv_length // BLOCK_N
        return (kv_length + BLOCK_N - 1) // BLOCK_N - plain, plain


@gluon.jit
def await_tile(k_empty, passed, step, empties, before, STAGES: gl.constexpr):
    """Wait until no consumer reads the queries of the tile before, nor what was said of it: it has
    the scores of that tile's last step.

    Args:
        step: the next.
        empties: how many tiles without a step there were; where queries and out share their room,
            how many tiles.
        before: 0 if there was no tile, 2 if `passed` tells, else 1.
    """
    if before == 1:
        mbarrier.wait(k_empty.index((step - 1) % STAGES), ((step - 1) // STAGES) & 1)
    elif before == 2:
        mbarrier.wait(passed, (empties - 1) & 1)


@gluon.jit
def load_queries(
    q_descs, q_bufs, q_full, k_empty, passed, tile_words, step, empties, before, b, h, first_row,
    masked, plain, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):
    """The rows of a tile, and what is said of it, for each consumer."""
    await_tile(k_empty, passed, step, empties, before, STAGES)
    for c in gl.static_range(CONSUMERS):
        say(tile_words, c * WORDS, first_row)
        say(tile_words, c * WORDS + 1, b)
        say(tile_words, c * WORDS + 2, h)
        say(tile_words, c * WORDS + 3, masked)
        say(tile_words, c * WORDS + 4, plain)
        mbarrier.expect(q_full.index(c), ROWS * D * 2)
        load_parts(q_descs, q_bufs, c, q_full.index(c), b, h, first_row + c * ROWS)


@gluon.jit
def load_step(
    q_descs, k_descs, v_descs, q_bufs, k_bufs, v_bufs, q_full, k_full, k_empty, v_full, v_empty,
    passed, tile_words, step_words, step, first_step, empties, before, b, h, kv_b, kv_head,
    first_row, masked, plain, first, end, full, CONSUMERS: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
):
    """Keys and values of a step. A tile's queries come between those of its first step: there is
    room for keys earlier."""
    slot = step % STAGES
    phase = ((step // STAGES) & 1) ^ 1
    mbarrier.wait(k_empty.index(slot), phase)
    say(step_words, slot * WORDS, first)
    say(step_words, slot * WORDS + 1, end)
    say(step_words, slot * WORDS + 2, full)
    mbarrier.expect(k_full.index(slot), BLOCK_N * D * 2)
    load_parts(k_descs, k_bufs, slot, k_full.index(slot), kv_b, kv_head, first)
    if step == first_step:
        load_queries(
            q_descs, q_bufs, q_full, k_empty, passed, tile_words, step, empties, before, b, h,
            first_row, masked, plain, CONSUMERS, STAGES, D,
        )
    mbarrier.wait(v_empty.index(slot), phase)
    mbarrier.expect(v_full.index(slot), BLOCK_N * DV * 2)
    load_parts(v_descs, v_bufs, slot, v_full.index(slot), kv_b, kv_head, first)


@gluon.jit
def load_steps(
    q_descs, k_descs, v_descs, q_bufs, k_bufs, v_bufs, q_full, k_full, k_empty, v_full, v_empty,
    passed, tile_words, step_words, step, first_step, empties, before, runs, run, last_run,
    may_be_dead, b, h, kv_b, kv_head, first_row, masked, plain, kv_length, KV_BLOCK: gl.constexpr,
    HAS_MASK: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr,
):
    """The steps of a row of runs that have dead pairs if any have (`may_be_dead`), or its others.
    Returns the step after.

    A function of its own, for Triton walks through the body of a loop in three others 16 times.
    """
    for r in range(run, last_run):
        begin, end, full = bounded_run(runs, r, KV_BLOCK, kv_length, HAS_MASK)
        middle = begin
        if full:
            middle += (end - begin) // BLOCK_N * BLOCK_N
        if may_be_dead:
            begin = middle
        else:
            end = middle
        for first in range(begin, end, BLOCK_N):
            load_step(
                q_descs, k_descs, v_descs, q_bufs, k_bufs, v_bufs, q_full, k_full, k_empty, v_full,
                v_empty, passed, tile_words, step_words, step, first_step, empties, before, b, h,
                kv_b, kv_head, first_row, masked, plain, first, end, gl.cast(full, gl.int32),
                CONSUMERS, STAGES, BLOCK_N, D, DV,
            )
            step += 1
    return step


@gluon.jit
def produce(
    q_descs, k_descs, v_descs, q_bufs, k_bufs, v_bufs, q_full, k_full, k_empty, v_full, v_empty,
    passed, tile_words, step_words, counter, offsets, ends, runs, mask_strides, tile_order,
    order_strides, ordered, batch_heads, heads, kv_length, tiles, head_group,
    HAS_MASK: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, GROUP: gl.constexpr,
    KV_SHARED: gl.constexpr, D: gl.constexpr, DV: gl.constexpr, EVEN: gl.constexpr,
    DYNAMIC: gl.constexpr, SHARES_ROOM: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    step = gl.to_tensor(0)
    empties = gl.to_tensor(0)
    before = gl.to_tensor(0)
    count = tiles * batch_heads
    at = gl.program_id(0)
    while at < count:
        if DYNAMIC:
            following = count
            if gl.num_programs(0) < count:
                # Asked for early: the answer takes as long as a step.
                following = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        else:
            following = at + gl.num_programs(0)
        tile, bh = tile_of_program(at, tiles, batch_heads, head_group)
        b = bh // heads
        h = bh % heads
        kv_head = h // GROUP
        kv_b = 0 * b if KV_SHARED else b
        if HAS_MASK:  # noqa: SIM102  the other is known at run time alone
            if ordered:
                tile = gl.load(tile_order + b * order_strides[0] + h * order_strides[1] + tile)
        first_row = tile * BLOCK_M
        if HAS_MASK:
            run, last_run = mask_row(offsets, ends, mask_strides, b, h, first_row // Q_BLOCK)
        else:
            run = gl.to_tensor(0)
            last_run = gl.to_tensor(1)
        masked, plain = count_steps(
            runs, run, last_run, kv_length, KV_BLOCK, HAS_MASK, EVEN, BLOCK_N,
        )
        first_step = step
        # First what may have dead pairs, then the rest, whose loop, where APART, has no mask's
        # code.
        for part in range(2):
            step = load_steps(
                q_descs, k_descs, v_descs, q_bufs, k_bufs, v_bufs, q_full, k_full, k_empty, v_full,
                v_empty, passed, tile_words, step_words, step, first_step, empties, before, runs,
                run, last_run, part == 0, b, h, kv_b, kv_head, first_row, masked, plain,
                kv_length, KV_BLOCK, HAS_MASK, CONSUMERS, STAGES, BLOCK_N, D, DV,
            )
        if step == first_step:
            load_queries(
                q_descs, q_bufs, q_full, k_empty, passed, tile_words, step, empties, before, b, h,
                first_row, masked, plain, CONSUMERS, STAGES, D,
            )
        if SHARES_ROOM or step == first_step:
            empties += 1
            before = gl.to_tensor(2)
        else:
            before = gl.to_tensor(1)
        at = following
    # No more tiles.
    await_tile(k_empty, passed, step, empties, before, STAGES)
    for c in gl.static_range(CONSUMERS):
        say(tile_words, c * WORDS, -1)
        mbarrier.arrive(q_full.index(c), count=1)


# The consumers

@gluon.jit
def said_of_step(
    step_words, slot, masked, MASKED: gl.constexpr, EVEN: gl.constexpr, ALWAYS: gl.constexpr
):
    """(first key, end, whether FULL) of a step as far as its weights need them, before its slot is
    given back.

    Args:
        ALWAYS: the first key is needed without a mask too.
    """
    first = gl.to_tensor(0)
    end = gl.to_tensor(0)
    full = gl.to_tensor(True)
    if ALWAYS:
        first = said(step_words, slot * WORDS)
    if MASKED:  # noqa: SIM102  the other is known at run time alone
        if masked:
            if not ALWAYS:
                first = said(step_words, slot * WORDS)
            if not EVEN:
                end = said(step_words, slot * WORDS + 1)
                full = said(step_words, slot * WORDS + 2) != 0
    return first, end, full


@gluon.jit
def tables_of_step(
    tables, b, h, first, kv_length, shifts, ints, floats, READ_COLUMNS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """`tables` with what a step's keys alone decide: a key a thread, on the way while products
    run. In the layout of scores each thread would read a quarter of them, one by one."""
    if READ_COLUMNS is None:
        return tables
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        keys = gl.minimum(first + gl.arange(0, BLOCK_N, layout=LAYOUT), kv_length - 1)
        return READ_COLUMNS(b, h, keys + shifts[3], tables, ints, floats)


@gluon.jit
def largest_of(scores, S_LAYOUT: gl.constexpr, CHAINS: gl.constexpr):
    """The largest score of each row. A thread has a quarter of each of its two rows, of which it
    finds the largest in CHAINS chains of operations that don't wait for each other."""
    if CHAINS == 1:
        return gl.max(scores, 1)
    else:
        gl.static_assert(CHAINS % 2 == 0 and scores.shape[1] % (4 * CHAINS) == 0)
        # Of each eight columns a thread has two: nothing moves between threads before the last
        # maximum, of QUARTERS.
        parts = scores.reshape([ROWS, scores.shape[1] // (4 * CHAINS), CHAINS // 2, 4, 2])
        parts = gl.max(gl.max(gl.max(parts, 1), 3), 1)
        parts = gl.convert_layout(parts, QUARTERS, assert_trivial=True)
        OF_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
        return gl.convert_layout(gl.max(parts, 1), OF_ROWS, assert_trivial=True)


@gluon.jit
def weights_of(
    raw, top, base, totals, nans, first, end, full, masked, b, h, q_idx, kv_length, shifts, tables,
    ints, floats, scale, MASKED: gl.constexpr, EVEN: gl.constexpr, SCORE_MOD: gl.constexpr,
    MASK_SCORES: gl.constexpr, WANT_MAX: gl.constexpr, PINNED: gl.constexpr, CHAINS: gl.constexpr,
    S_LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr,
):
    """(weights, alpha, top, base, totals, nans) after a step whose scores are `raw`: one of an
    online softmax, as in `anyflex_triton.forward.forward_step`.

    Args:
        top: the largest score so far; base: that in powers of two, to which weights are relative.
        totals: a row's sum of weights, of QUARTERS.
        masked: whether some pair of the step may be dead, where MASKED.
    """
    # Where tiles end with the keys, no FULL step has dead pairs.
    scores = scores_of_step(
        raw, first, end, None if EVEN else full, masked, b, h, q_idx, kv_length, shifts, tables,
        ints, floats, scale, MASKED, EVEN, SCORE_MOD, MASK_SCORES, S_LAYOUT, BLOCK_N,
    )
    if WANT_MAX:
        nans = gl.maximum(nans, gl.max((scores != scores).to(gl.int32), 1))
    unit = unit_of_scores(scale, SCORE_MOD)
    new_top = gl.maximum(top, largest_of(scores, S_LAYOUT, CHAINS))
    new_base = new_top * unit
    shift = gl.where(new_base <= -FAR, 0.0, new_base)
    weights = gl.exp2(scores * unit - gl.expand_dims(shift, 1))
    alpha = gl.exp2(base - shift)
    # Of each thread's own weights: they are added up when the tile ends.
    parts = gl.sum(gl.sum(weights.reshape([ROWS, BLOCK_N // 8, 4, 2]), 3), 1)
    parts = gl.convert_layout(parts, QUARTERS, assert_trivial=True)
    factors = gl.convert_layout(alpha, gl.SliceLayout(1, QUARTERS), assert_trivial=True)
    totals = totals * gl.expand_dims(factors, 1) + parts
    if PINNED:
        totals = pin(totals)
    return weights, alpha, new_top, new_base, totals, nans


@gluon.jit
def products_of_keys(q_bufs, k_bufs, ME: gl.constexpr, slot, S_LAYOUT: gl.constexpr):
    """Scores of a step, on their way."""
    BLOCK_N: gl.constexpr = k_bufs[0].shape[3]
    later = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=S_LAYOUT)
    for p in gl.static_range(len(k_bufs)):
        q = q_bufs[p].index(ME).reshape([ROWS, q_bufs[p].shape[4]])
        k = k_bufs[p].index(slot).reshape([BLOCK_N, k_bufs[p].shape[4]]).permute((1, 0))
        later = warpgroup_mma(q, k, later, use_acc=p > 0, is_async=True)
    return later


@gluon.jit
def products_of_handed(handed, v_bufs, slot, acc, APART: gl.constexpr):
    """`products_of_values` of what was `handed_over`."""
    FIRST: gl.constexpr = layout_of_products(acc[0].shape[1])
    return products_of_values(
        operand_of(handed, v_bufs[0].dtype, FIRST, APART), v_bufs, slot, acc,
    )


@gluon.jit
def multiplied(acc, factors, SKIPS: gl.constexpr):
    """A part's sums with a factor for each row.

    Args:
        SKIPS: see `rescaled`.
    """
    COLUMNS: gl.constexpr = acc.shape[1]
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, layout_of_products(COLUMNS))
    factors = gl.expand_dims(gl.convert_layout(factors, OF_ROWS), 1)
    if SKIPS:
        return rescaled(acc, factors, COLUMNS // 2)
    else:
        return acc * factors


@gluon.jit
def all_multiplied(acc, factors, SKIPS: gl.constexpr):
    """`multiplied` of each part."""
    products = acc[:0]
    for p in gl.static_range(len(acc)):
        products = products + (multiplied(acc[p], factors, SKIPS),)
    return products


@gluon.jit
def advance(
    step, handed, acc, top, base, totals, nans, q_bufs, k_bufs, v_bufs, k_full, k_empty, v_full,
    v_empty, step_words, masked, b, h, q_idx, kv_length, shifts, tables, ints, floats, scale,
    ME: gl.constexpr, MASKED: gl.constexpr, EVEN: gl.constexpr, READ_COLUMNS: gl.constexpr,
    ALWAYS: gl.constexpr, SCORE_MOD: gl.constexpr, MASK_SCORES: gl.constexpr,
    WANT_MAX: gl.constexpr, PINNED: gl.constexpr, SKIPS: gl.constexpr, APART: gl.constexpr,
    CHAINS: gl.constexpr, S_LAYOUT: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):
    """One step: its scores, while the weights of the step before (`handed`) meet their values;
    then its weights."""
    slot = step % STAGES
    before = (step - 1) % STAGES
    mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
    first, end, full = said_of_step(step_words, slot, masked, MASKED, EVEN, ALWAYS)
    if APART and MASKED:
        # In a loop of such steps alone compilers mustn't know that there are no others: behind a
        # branch a mask is evaluated pair by pair, without it all pairs' conditions come before the
        # scores are there, and are kept as bits.
        masked = said(step_words, slot * WORDS + 2) >= 0
    tables = tables_of_step(
        tables, b, h, first, kv_length, shifts, ints, floats, READ_COLUMNS, BLOCK_N,
    )
    raw_later = products_of_keys(q_bufs, k_bufs, ME, slot, S_LAYOUT)
    mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
    acc_later = products_of_handed(handed, v_bufs, before, acc, APART)
    raw = warpgroup_mma_wait(num_outstanding=len(acc_later), deps=(raw_later,))
    mbarrier.arrive(k_empty.index(slot), count=1)
    weights, alpha, top, base, totals, nans = weights_of(
        raw, top, base, totals, nans, first, end, full, masked, b, h, q_idx, kv_length, shifts,
        tables, ints, floats, scale, MASKED, EVEN, SCORE_MOD, MASK_SCORES, WANT_MAX, PINNED,
        CHAINS, S_LAYOUT, BLOCK_N,
    )
    acc = awaited(acc_later, 0)
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = all_multiplied(acc, alpha, SKIPS)
    handed = handed_over(
        weights, v_bufs[0].dtype, layout_of_products(v_bufs[0].shape[4]), APART,
    )
    return handed, acc, top, base, totals, nans


@gluon.jit
def consume(
    o_descs, r_descs, q_bufs, k_bufs, v_bufs, o_bufs, r_bufs, q_full, k_full, k_empty, v_full,
    v_empty, passed, tile_words, step_words, query, key, value, out, rest, q_strides, k_strides,
    v_strides, o_strides, r_strides, offsets, ends, runs, mask_strides, tops, lse, max_scores,
    tables, ints, floats, shifts, scale, heads, q_length, kv_length, ME: gl.constexpr,
    SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, READ_ROWS: gl.constexpr,
    READ_COLUMNS: gl.constexpr, SCORE_MOD_OF_READ: gl.constexpr, MASK_SCORES: gl.constexpr,
    HAS_MASK: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, GROUP: gl.constexpr,
    KV_SHARED: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr, WANT_LSE: gl.constexpr,
    WANT_MAX: gl.constexpr, WANT_REST: gl.constexpr, EVEN: gl.constexpr, MASKED: gl.constexpr,
    SHARES_ROOM: gl.constexpr, PINNED: gl.constexpr, SKIPS: gl.constexpr, APART: gl.constexpr,
    CHAINS: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):
    """All tiles' rows of consumer ME.

    Args:
        passed: counts consumers that are done with a tile without steps; where SHARES_ROOM, with
            any tile.
        SHARES_ROOM: out and rest are written to where the queries were.
        MASKED: whether any step may have dead pairs.
    """
    S_LAYOUT: gl.constexpr = layout_of_products(BLOCK_N)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    ALWAYS: gl.constexpr = SCORE_MOD is not None or READ_COLUMNS is not None
    step = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    mbarrier.wait(q_full.index(ME), 0)
    first_row = said(tile_words, ME * WORDS)
    while first_row >= 0:
        b = said(tile_words, ME * WORDS + 1)
        h = said(tile_words, ME * WORDS + 2)
        masked = said(tile_words, ME * WORDS + 3)
        steps = masked + said(tile_words, ME * WORDS + 4)
        first_row += ME * ROWS
        mod_b = b + shifts[0]
        mod_h = h + shifts[1]
        rows = first_row + gl.arange(0, ROWS, layout=OF_ROWS)
        q_idx = gl.expand_dims(gl.minimum(rows, q_length - 1), 1) + shifts[2]
        if READ_ROWS is not None:
            read = READ_ROWS(mod_b, mod_h, q_idx, tables, ints, floats)
        else:
            read = tables
        top = gl.full([ROWS], float("-inf"), gl.float32, layout=OF_ROWS)
        base = gl.full([ROWS], float("-inf"), gl.float32, layout=OF_ROWS)
        totals = gl.full([ROWS, 4], 0.0, gl.float32, layout=QUARTERS)
        nans = gl.full([ROWS], 0, gl.int32, layout=OF_ROWS)
        acc = v_bufs[:0]
        for p in gl.static_range(len(v_bufs)):
            acc = acc + (zeros_of(v_bufs[p].shape[4]),)
        if steps > 0:
            slot = step % STAGES
            mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
            first, end, full = said_of_step(
                step_words, slot, masked > 0, MASKED, EVEN, ALWAYS,
            )
            first_read = tables_of_step(
                read, mod_b, mod_h, first, kv_length, shifts, ints, floats, READ_COLUMNS, BLOCK_N,
            )
            raw_later = products_of_keys(q_bufs, k_bufs, ME, slot, S_LAYOUT)
            raw = warpgroup_mma_wait(num_outstanding=0, deps=(raw_later,))
            mbarrier.arrive(k_empty.index(slot), count=1)
            weights, _alpha, top, base, totals, nans = weights_of(
                raw, top, base, totals, nans, first, end, full, masked > 0, mod_b, mod_h, q_idx,
                kv_length, shifts, first_read, ints, floats, scale, MASKED, EVEN,
                SCORE_MOD_OF_READ, MASK_SCORES, WANT_MAX, PINNED, CHAINS, S_LAYOUT, BLOCK_N,
            )
            handed = handed_over(
                weights, v_bufs[0].dtype, layout_of_products(v_bufs[0].shape[4]), APART,
            )
            step += 1
            # Steps that may have dead pairs come first.
            for i in range(1, masked if APART else steps):
                handed, acc, top, base, totals, nans = advance(
                    step, handed, acc, top, base, totals, nans, q_bufs, k_bufs, v_bufs, k_full,
                    k_empty, v_full, v_empty, step_words, i < masked, mod_b, mod_h, q_idx,
                    kv_length, shifts, read, ints, floats, scale, ME, MASKED, EVEN, READ_COLUMNS,
                    ALWAYS, SCORE_MOD_OF_READ, MASK_SCORES, WANT_MAX, PINNED, SKIPS, APART, CHAINS,
                    S_LAYOUT, STAGES, BLOCK_N,
                )
                step += 1
            if APART:
                for _ in range(gl.maximum(masked, 1), steps):
                    handed, acc, top, base, totals, nans = advance(
                        step, handed, acc, top, base, totals, nans, q_bufs, k_bufs, v_bufs, k_full,
                        k_empty, v_full, v_empty, step_words, False, mod_b, mod_h, q_idx,
                        kv_length, shifts, read, ints, floats, scale, ME, False, True,
                        READ_COLUMNS, ALWAYS, SCORE_MOD_OF_READ, MASK_SCORES, WANT_MAX, PINNED,
                        SKIPS, APART, CHAINS, S_LAYOUT, STAGES, BLOCK_N,
                    )
                    step += 1
            slot = (step - 1) % STAGES
            mbarrier.wait(v_full.index(slot), ((step - 1) // STAGES) & 1)
            acc = awaited(products_of_handed(handed, v_bufs, slot, acc, APART), 0)
            mbarrier.arrive(v_empty.index(slot), count=1)
        elif not SHARES_ROOM:
            mbarrier.arrive(passed, count=1)
        total = gl.convert_layout(gl.sum(totals, 1), OF_ROWS, assert_trivial=True)
        # A value that isn't finite has reached rows that don't see it too: 0 * NaN is NaN. And
        # weights of far rows are none.
        odd = is_far(top, base)
        for p in gl.static_range(len(acc)):
            none = gl.convert_layout(gl.sum(acc[p] * 0.0, 1), OF_ROWS)
            odd |= none != none
        # What rounding added to the base: weights are relative to it, not to top.
        excess = gl.fma(top, 0.0 - unit_of_scores(scale, SCORE_MOD), base)
        if gl.max(odd.to(gl.int32), 0) > 0:
            top, total = write_strange_rows(
                query, key, value, out, rest, q_strides, k_strides, v_strides, o_strides,
                r_strides, offsets, ends, runs, mask_strides, b, h, first_row, q_length, kv_length,
                tables, ints, floats, shifts, scale, SCORE_MOD, MASK_MOD, HAS_MASK, Q_BLOCK,
                KV_BLOCK, GROUP, KV_SHARED, DIM, VALUE_DIM, ROWS, WANT_REST, OF_ROWS,
            )
            excess = gl.full([ROWS], 0.0, gl.float32, layout=OF_ROWS)
        else:
            # A row without a live pair has 0 here, and gives 0. NaN stays.
            dead = (top == float("-inf")) & (total == total)
            inverse = gl.where(dead, 0.0, 1.0 / gl.where(dead, 1.0, total))
            acc = all_multiplied(acc, inverse, False)
            # The tile before may still be read.
            tma.store_wait(0)
            place_parts(acc, o_bufs, ME, False)
            if WANT_REST and not SHARES_ROOM:
                place_parts(acc, r_bufs, ME, True)
            fence_async_shared()
            store_parts(o_descs, o_bufs, ME, b, h, first_row)
            if WANT_REST:
                if SHARES_ROOM:
                    tma.store_wait(0)
                    place_parts(acc, r_bufs, ME, True)
                    fence_async_shared()
                store_parts(r_descs, r_bufs, ME, b, h, first_row)
        at = gl.cast(b * heads + h, gl.int64) * q_length + rows
        write_row_sums(
            top, total, excess, nans, tops, lse, max_scores, at, rows < q_length, scale,
            SCORE_MOD is not None, WANT_LSE, WANT_MAX, WANT_REST,
        )
        if SHARES_ROOM:
            tma.store_wait(0)
            mbarrier.arrive(passed, count=1)
        turn += 1
        mbarrier.wait(q_full.index(ME), turn & 1)
        first_row = said(tile_words, ME * WORDS)
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, r_desc, q2_desc, k2_desc, v2_desc, o2_desc, r2_desc, query,
    key, value, out, rest, q_strides, k_strides, v_strides, o_strides, r_strides, tops, lse,
    max_scores, counter, offsets, ends, runs, mask_strides, tile_order, order_strides, ordered,
    tables, ints, floats, shifts, scale, batch_heads, heads, q_length, kv_length, tiles,
    head_group, SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, READ_ROWS: gl.constexpr,
    READ_COLUMNS: gl.constexpr, SCORE_MOD_OF_READ: gl.constexpr, MASK_SCORES: gl.constexpr,
    HAS_MASK: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, GROUP: gl.constexpr,
    KV_SHARED: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr, WANT_LSE: gl.constexpr, WANT_MAX: gl.constexpr, WANT_REST: gl.constexpr,
    EVEN: gl.constexpr, DYNAMIC: gl.constexpr, PINNED: gl.constexpr, SKIPS: gl.constexpr,
    APART: gl.constexpr, CHAINS: gl.constexpr, SHARES_ROOM: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):
    """Programs that take tiles of 64 * CONSUMERS query rows of one head until there are no more.

    Args:
        q_desc, k_desc, v_desc, o_desc, r_desc: descriptors [B, H, rows, dims] of query, key,
            value, out and rest; boxes of 64 or BLOCK_N rows, D or DV columns. Of rest nothing
            is there without WANT_REST.
        q2_desc, k2_desc, v2_desc, o2_desc, r2_desc: of the second part, None where there is none;
            then the first ones' boxes have the columns of the first.
        query, key, value, out, rest: for `write_strange_rows`, with strides (b, h, row); DIM and
            VALUE_DIM are their columns.
        tops: [B, Hq, L, 2], float32, where WANT_REST, as `anyflex_triton.forward`'s.
        lse, max_scores: [B, Hq, L], float32.
        counter: int32, zero at first: tiles that were taken beyond each program's first. Read
            where DYNAMIC and programs are fewer than tiles.
        tile_order, order_strides, ordered: of `anyflex_cuda.tile_order`, None without a mask; read
            where `ordered` isn't 0, else the order is a head's last tiles first.
        offsets, ends, runs, mask_strides, tables, ints, floats, shifts, scale, batch_heads, heads,
            tiles, head_group: as `anyflex_triton.forward`'s.
        Q_BLOCK, KV_BLOCK: the mask's; Q_BLOCK is a multiple of a tile's rows.
        EVEN: kv_length, and KV_BLOCK, are multiples of BLOCK_N.
        PINNED: a step's softmax runs beside the product of the weights before: see `pin`.
        SKIPS: products with factors of 1 are jumped over: see `rescaled`.
        APART: steps that may have dead pairs have a loop of their own.
        CHAINS: of `largest_of`.
        SHARES_ROOM: out and rest, whose parts are as wide as the queries' first ones, are stored
            from where these were, for all don't fit.
        READ_ROWS, READ_COLUMNS, SCORE_MOD_OF_READ, MASK_SCORES: of `anyflex_triton.mods`, for
            the loops; the first two None where nothing is read early.
    """
    ONE_ROW: gl.constexpr = mbarrier.MBarrierLayout()
    WORD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    MASKED: gl.constexpr = HAS_MASK or not EVEN
    q_descs = descriptors(q_desc, q2_desc)
    k_descs = descriptors(k_desc, k2_desc)
    v_descs = descriptors(v_desc, v2_desc)
    o_descs = descriptors(o_desc, o2_desc)
    r_descs = descriptors(r_desc, r2_desc)
    q_bufs = buffers(q_descs, CONSUMERS)
    if SHARES_ROOM:
        o_bufs = q_bufs[: len(o_descs)]
    else:
        o_bufs = buffers(o_descs, CONSUMERS)
    if WANT_REST and not SHARES_ROOM:
        r_bufs = buffers(r_descs, CONSUMERS)
    else:
        r_bufs = o_bufs
    k_bufs = buffers(k_descs, STAGES)
    v_bufs = buffers(v_descs, STAGES)
    tile_words = gl.allocate_shared_memory(gl.int32, [CONSUMERS * WORDS, 1], WORD)
    step_words = gl.allocate_shared_memory(gl.int32, [STAGES * WORDS, 1], WORD)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], ONE_ROW)
    passed = gl.allocate_shared_memory(gl.int64, [1], ONE_ROW)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
    mbarrier.init(passed, count=CONSUMERS)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=CONSUMERS)
        mbarrier.init(v_empty.index(s), count=CONSUMERS)
    fence_async_shared()
    # Written out: in a tuple that has a name, or is joined from others, constants are none.
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (
                o_descs, r_descs, q_bufs, k_bufs, v_bufs, o_bufs, r_bufs, q_full, k_full, k_empty,
                v_full, v_empty, passed, tile_words, step_words, query, key, value, out, rest,
                q_strides, k_strides, v_strides, o_strides, r_strides, offsets, ends, runs,
                mask_strides, tops, lse, max_scores, tables, ints, floats, shifts, scale, heads,
                q_length, kv_length, 0, SCORE_MOD, MASK_MOD, READ_ROWS, READ_COLUMNS,
                SCORE_MOD_OF_READ, MASK_SCORES, HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP, KV_SHARED,
                DIM, VALUE_DIM, WANT_LSE, WANT_MAX, WANT_REST, EVEN, MASKED, SHARES_ROOM,
                PINNED, SKIPS, APART, CHAINS, STAGES, BLOCK_N,
            )),
            (produce, (
                q_descs, k_descs, v_descs, q_bufs, k_bufs, v_bufs, q_full, k_full, k_empty, v_full,
                v_empty, passed, tile_words, step_words, counter, offsets, ends, runs,
                mask_strides, tile_order, order_strides, ordered, batch_heads, heads, kv_length,
                tiles, head_group, HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP, KV_SHARED, D, DV, EVEN,
                DYNAMIC, SHARES_ROOM, CONSUMERS, STAGES, BLOCK_N,
            )),
        ], [1], [PRODUCER_REGISTERS])
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (
                o_descs, r_descs, q_bufs, k_bufs, v_bufs, o_bufs, r_bufs, q_full, k_full, k_empty,
                v_full, v_empty, passed, tile_words, step_words, query, key, value, out, rest,
                q_strides, k_strides, v_strides, o_strides, r_strides, offsets, ends, runs,
                mask_strides, tops, lse, max_scores, tables, ints, floats, shifts, scale, heads,
                q_length, kv_length, 0, SCORE_MOD, MASK_MOD, READ_ROWS, READ_COLUMNS,
                SCORE_MOD_OF_READ, MASK_SCORES, HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP, KV_SHARED,
                DIM, VALUE_DIM, WANT_LSE, WANT_MAX, WANT_REST, EVEN, MASKED, SHARES_ROOM,
                PINNED, SKIPS, APART, CHAINS, STAGES, BLOCK_N,
            )),
            (consume, (
                o_descs, r_descs, q_bufs, k_bufs, v_bufs, o_bufs, r_bufs, q_full, k_full, k_empty,
                v_full, v_empty, passed, tile_words, step_words, query, key, value, out, rest,
                q_strides, k_strides, v_strides, o_strides, r_strides, offsets, ends, runs,
                mask_strides, tops, lse, max_scores, tables, ints, floats, shifts, scale, heads,
                q_length, kv_length, 1, SCORE_MOD, MASK_MOD, READ_ROWS, READ_COLUMNS,
                SCORE_MOD_OF_READ, MASK_SCORES, HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP, KV_SHARED,
                DIM, VALUE_DIM, WANT_LSE, WANT_MAX, WANT_REST, EVEN, MASKED, SHARES_ROOM,
                PINNED, SKIPS, APART, CHAINS, STAGES, BLOCK_N,
            )),
            (produce, (
                q_descs, k_descs, v_descs, q_bufs, k_bufs, v_bufs, q_full, k_full, k_empty, v_full,
                v_empty, passed, tile_words, step_words, counter, offsets, ends, runs,
                mask_strides, tile_order, order_strides, ordered, batch_heads, heads, kv_length,
                tiles, head_group, HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP, KV_SHARED, D, DV, EVEN,
                DYNAMIC, SHARES_ROOM, CONSUMERS, STAGES, BLOCK_N,
            )),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])
    else:
        gl.warp_specialize([
            (consume, (
                o_descs, r_descs, q_bufs, k_bufs, v_bufs, o_bufs, r_bufs, q_full, k_full, k_empty,
                v_full, v_empty, passed, tile_words, step_words, query, key, value, out, rest,
                q_strides, k_strides, v_strides, o_strides, r_strides, offsets, ends, runs,
                mask_strides, tops, lse, max_scores, tables, ints, floats, shifts, scale, heads,
                q_length, kv_length, 0, SCORE_MOD, MASK_MOD, READ_ROWS, READ_COLUMNS,
                SCORE_MOD_OF_READ, MASK_SCORES, HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP, KV_SHARED,
                DIM, VALUE_DIM, WANT_LSE, WANT_MAX, WANT_REST, EVEN, MASKED, SHARES_ROOM,
                PINNED, SKIPS, APART, CHAINS, STAGES, BLOCK_N,
            )),
            (consume, (
                o_descs, r_descs, q_bufs, k_bufs, v_bufs, o_bufs, r_bufs, q_full, k_full, k_empty,
                v_full, v_empty, passed, tile_words, step_words, query, key, value, out, rest,
                q_strides, k_strides, v_strides, o_strides, r_strides, offsets, ends, runs,
                mask_strides, tops, lse, max_scores, tables, ints, floats, shifts, scale, heads,
                q_length, kv_length, 1, SCORE_MOD, MASK_MOD, READ_ROWS, READ_COLUMNS,
                SCORE_MOD_OF_READ, MASK_SCORES, HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP, KV_SHARED,
                DIM, VALUE_DIM, WANT_LSE, WANT_MAX, WANT_REST, EVEN, MASKED, SHARES_ROOM,
                PINNED, SKIPS, APART, CHAINS, STAGES, BLOCK_N,
            )),
            (consume, (
                o_descs, r_descs, q_bufs, k_bufs, v_bufs, o_bufs, r_bufs, q_full, k_full, k_empty,
                v_full, v_empty, passed, tile_words, step_words, query, key, value, out, rest,
                q_strides, k_strides, v_strides, o_strides, r_strides, offsets, ends, runs,
                mask_strides, tops, lse, max_scores, tables, ints, floats, shifts, scale, heads,
                q_length, kv_length, 2, SCORE_MOD, MASK_MOD, READ_ROWS, READ_COLUMNS,
                SCORE_MOD_OF_READ, MASK_SCORES, HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP, KV_SHARED,
                DIM, VALUE_DIM, WANT_LSE, WANT_MAX, WANT_REST, EVEN, MASKED, SHARES_ROOM,
                PINNED, SKIPS, APART, CHAINS, STAGES, BLOCK_N,
            )),
            (produce, (
                q_descs, k_descs, v_descs, q_bufs, k_bufs, v_bufs, q_full, k_full, k_empty, v_full,
                v_empty, passed, tile_words, step_words, counter, offsets, ends, runs,
                mask_strides, tile_order, order_strides, ordered, batch_heads, heads, kv_length,
                tiles, head_group, HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP, KV_SHARED, D, DV, EVEN,
                DYNAMIC, SHARES_ROOM, CONSUMERS, STAGES, BLOCK_N,
            )),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])
