"""Backward on Hopper above head dim 128: a kernel that makes dK and dV, and one that makes dQ.

Registers of a warpgroup hold one gradient of 64 rows, beside a step's scores. So a program that
makes dK and dV, of 64 keys, has a consumer of four warps for each: that of dV makes the weights,
and hands what is left of them after the score mod's derivative to that of dK, which makes dout's
products with the values meanwhile. A program that makes dQ, of 128 query rows, has two consumers
of 64 rows each, which need nothing of each other. A producer of one warp loads by TMA. Either way
a step's scores are those of own rows (keys, query rows) by columns (query rows, keys), so that
what is made of them is a register operand of the product that adds to the gradient.

Scores and dout's products are computed twice, 7 products where `hopper_backward` has 5; but
nothing is added up in memory, and all sums repeat to the last bit.

Before them runs `backward_rows.prepare_kernel`, after them `repair_kernel`.
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

from anyflex_cuda.hopper_backward import (
    head_of_stream,
    is_finite,
    now,
    run_at,
    runs_of,
    steps_of,
    tile_of,
)
from anyflex_cuda.named_barriers import named_barrier
from anyflex_cuda.spoken_words import said, say
from anyflex_cuda.step_weights import weights_of
from anyflex_cuda.tile_parts import (
    awaited,
    buffers,
    descriptors,
    layout_of_products,
    load_box,
    load_parts,
    place_parts,
    products_of_values,
    store_parts,
    zeros_of,
)

__all__ = ["key_kernel", "query_kernel"]

# Argument lists would be a line an argument.
# fmt: off

STEP = gl.constexpr(64)
"""Columns: query rows for dK and dV, keys for dQ."""
STAGES = gl.constexpr(2)
"""Steps whose first tensor, of which scores are made, is in shared memory; for dK and dV the
second, dout, too: for dQ there is room for one step's values."""

# Barriers, two of each, one a slot: of a step's first tensor and of its second; when dV's consumer
# has placed what dK's takes, and when that has it. At a tile's end dK's consumer says by the first
# of PLACED whether dK is fine.
OF_FIRST = gl.constexpr(8)
OF_SECOND = gl.constexpr(10)
PLACED = gl.constexpr(12)
TAKEN = gl.constexpr(14)


# What producer and consumers agree on: runs, steps


@gluon.jit
def whole_steps(
    tile, q_length, kv_length, RAGGED: gl.constexpr, HAS_SCORE_MOD: gl.constexpr,
    OF_QUERIES: gl.constexpr,
):
    """(steps of a head, of which so many at the beginning have no row or key past the end that
    could matter)."""
    steps = gl.cdiv(kv_length if OF_QUERIES else q_length, STEP)
    if not RAGGED:
        return steps, steps
    elif OF_QUERIES:
        return steps, kv_length // STEP
    else:
        # Rows past the end have weights of 0, for their lse is +inf, but for what a mod makes.
        whole = q_length // STEP if HAS_SCORE_MOD else steps
        return steps, gl.where((tile + 1) * 64 > kv_length, 0, whole)


# Producer


@gluon.jit
def load_slot(
    it, first, b, h, OF_SLOT: gl.constexpr, descs, tiles, full, SLOTS: gl.constexpr,
    BYTES: gl.constexpr,
):
    """A step's first tensor, or its second, when both consumers have let its slot go."""
    slot = it % SLOTS
    if it >= SLOTS:
        named_barrier("sync", OF_SLOT + slot, 288, 1)
    mbarrier.expect(full.index(slot), BYTES)
    load_parts(descs, tiles, slot, full.index(slot), b, h, first)


@gluon.jit
def load_step(it, first, b, h, at_rows, descs, memory, D: gl.constexpr, DV: gl.constexpr):
    first_descs, second_descs, rows_desc = descs
    first_tiles, second_tiles, rows, first_full, second_full = memory
    SECOND_SLOTS: gl.constexpr = second_full.shape[0]
    load_slot(
        it, first, b, h, OF_FIRST, first_descs, first_tiles, first_full, STAGES, STEP * D * 2,
    )
    OF_ROWS: gl.constexpr = 0 if rows is None else STEP * 8
    load_slot(
        it, first, b, h, OF_SECOND, second_descs, second_tiles, second_full, SECOND_SLOTS,
        STEP * DV * 2 + OF_ROWS,
    )
    if rows is not None:
        slot = it % SECOND_SLOTS
        for i in gl.static_range(2):
            # lse2 and delta.
            load_box(rows_desc, [at_rows[i], first], second_full.index(slot), rows[i].index(slot))


@gluon.jit
def load_pass(
    it, run, last_run, runs, steps, whole, b, h, at_rows, descs, memory, MASKED: gl.constexpr,
    HAS_MASK: gl.constexpr, HAS_MASK_MOD: gl.constexpr, STEPS_A_BLOCK: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr,
):
    """As `consume_pass`."""
    if HAS_MASK:
        for r in range(run, last_run):
            begin, end, full = run_at(runs, r, steps, STEPS_A_BLOCK, HAS_MASK_MOD)
            start, stop = steps_of(begin, end, full, whole, MASKED)
            for i in range(start, stop):
                load_step(it, i * STEP, b, h, at_rows, descs, memory, D, DV)
                it += 1
    else:
        start, stop = steps_of(gl.to_tensor(0), steps, True, whole, MASKED)
        for i in range(start, stop):
            load_step(it, i * STEP, b, h, at_rows, descs, memory, D, DV)
            it += 1
    return it


@gluon.jit
def produce(
    own_descs, descs, own_memory, memory, mask, sizes, HAS_SCORE_MOD: gl.constexpr,
    HAS_MASK_MOD: gl.constexpr, HAS_MASK: gl.constexpr, OWN_BLOCK: gl.constexpr,
    STEP_BLOCK: gl.constexpr, GROUP: gl.constexpr, KV_SHARED: gl.constexpr, RAGGED: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, OF_QUERIES: gl.constexpr,
):
    """Loads the rows of a tile, then step by step what they see."""
    offsets, ends, runs, mask_strides = mask
    batch, heads, kv_heads, units, q_length, kv_length, tiles, head_group = sizes
    own_tiles, own_later_tiles, own_full = own_memory
    ROWS: gl.constexpr = 128 if OF_QUERIES else 64
    TILES_A_BLOCK: gl.constexpr = OWN_BLOCK // ROWS
    STEPS_A_BLOCK: gl.constexpr = STEP_BLOCK // STEP if HAS_MASK else 1
    tile, own_b, own_h = tile_of_this(
        tiles, units, heads if OF_QUERIES else kv_heads, head_group, OF_QUERIES,
    )
    steps, whole = whole_steps(tile, q_length, kv_length, RAGGED, HAS_SCORE_MOD, OF_QUERIES)
    mbarrier.expect(own_full, ROWS * (D + DV) * 2)
    for half in gl.static_range(ROWS // 64):
        first = tile * ROWS + half * 64
        load_parts(own_descs[0], own_tiles, half, own_full, own_b, own_h, first)
        load_parts(own_descs[1], own_later_tiles, half, own_full, own_b, own_h, first)
    it = gl.to_tensor(0)
    for stream in range(streams_of(batch, GROUP, KV_SHARED, OF_QUERIES)):
        b, h = head_of(stream, own_b, own_h, GROUP, KV_SHARED, OF_QUERIES)
        if OF_QUERIES:
            step_b = 0 * b if KV_SHARED else b
            step_h = h // GROUP
        else:
            step_b, step_h = b, h
        bh = b * heads + h
        at_rows = (bh, 3 * batch * heads + bh)
        run, last_run = runs_of(offsets, ends, mask_strides, b, h, tile, HAS_MASK, TILES_A_BLOCK)
        if HAS_MASK_MOD or RAGGED:
            it = load_pass(
                it, run, last_run, runs, steps, whole, step_b, step_h, at_rows, descs, memory,
                True, HAS_MASK, HAS_MASK_MOD, STEPS_A_BLOCK, D, DV,
            )
        it = load_pass(
            it, run, last_run, runs, steps, whole, step_b, step_h, at_rows, descs, memory, False,
            HAS_MASK, HAS_MASK_MOD, STEPS_A_BLOCK, D, DV,
        )
    # No barrier is left half full.
    SECOND_SLOTS: gl.constexpr = memory[4].shape[0]
    for last in range(gl.maximum(it - STAGES, 0), it):
        named_barrier("sync", OF_FIRST + last % STAGES, 288, 1)
    for last in range(gl.maximum(it - SECOND_SLOTS, 0), it):
        named_barrier("sync", OF_SECOND + last % SECOND_SLOTS, 288, 1)


@gluon.jit
def tile_of_this(tiles, units, heads, head_group, OF_QUERIES: gl.constexpr):
    """(tile, batch entry, head), the longest under causal masks first."""
    tile, unit = tile_of(gl.program_id(0), tiles, units, head_group)
    if OF_QUERIES:
        tile = tiles - 1 - tile
    return tile, unit // heads, unit % heads


@gluon.jit
def streams_of(batch, GROUP: gl.constexpr, KV_SHARED: gl.constexpr, OF_QUERIES: gl.constexpr):
    """Query heads that a tile sees."""
    if OF_QUERIES:
        return 1
    else:
        return GROUP * batch if KV_SHARED else GROUP


@gluon.jit
def head_of(
    stream, own_b, own_h, GROUP: gl.constexpr, KV_SHARED: gl.constexpr, OF_QUERIES: gl.constexpr,
):
    """(batch entry, query head) of one of `streams_of`."""
    if OF_QUERIES:
        return own_b, own_h
    else:
        return head_of_stream(stream, own_b, own_h, GROUP, KV_SHARED)


# Consumers


@gluon.jit
def begin_products(
    it, there, own_tiles, tiles, full, HALF: gl.constexpr, S_LAYOUT: gl.constexpr,
):
    """Of 64 own rows with a step's, in flight. If no such step is `there`, nothing is waited for,
    and they are of anything."""
    slot = it % full.shape[0]
    mbarrier.wait(full.index(slot), (it // full.shape[0]) & 1, pred=there)
    half = now(gl.to_tensor(HALF))
    later = gl.full([64, STEP], 0.0, gl.float32, layout=S_LAYOUT)
    for p in gl.static_range(len(tiles)):
        own = own_tiles[p].index(half).reshape([64, own_tiles[p].shape[4]])
        step = tiles[p].index(slot).reshape([STEP, tiles[p].shape[4]])
        later = warpgroup_mma(own, step.permute((1, 0)), later, use_acc=p > 0, is_async=True)
    return later


@gluon.jit
def weights_of_step(
    raw, lse2, first, own_first, full, b, h, lengths, mod_values, MASKED: gl.constexpr,
    RAGGED: gl.constexpr, SCORE_MOD: gl.constexpr, SCORE_MOD_BACKWARD: gl.constexpr,
    MASK_MOD: gl.constexpr, S_LAYOUT: gl.constexpr, OF_QUERIES: gl.constexpr,
):
    """(weights, weights times the score mod's derivative) [64, STEP]."""
    q_length, kv_length = lengths
    shifts, scale, tables, ints, floats = mod_values
    columns = gl.expand_dims(gl.arange(0, STEP, layout=gl.SliceLayout(0, S_LAYOUT)), 0)
    own = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT)), 1)
    if OF_QUERIES:
        rows, keys = own + own_first, columns + first
    else:
        rows, keys = columns + first, own + own_first
    if MASKED and RAGGED:
        q_idx = gl.minimum(rows, q_length - 1) + shifts[2]
        kv_idx = gl.minimum(keys, kv_length - 1) + shifts[3]
    # One sum for all columns: compilers would add its parts to each.
    elif OF_QUERIES:
        q_idx, kv_idx = rows + shifts[2], columns + now(first + shifts[3])
    else:
        q_idx, kv_idx = columns + now(first + shifts[2]), keys + shifts[3]
    weights, factor, _ = weights_of(
        raw, lse2, rows, keys, q_idx, kv_idx, full, b + shifts[0], h + shifts[1], q_length,
        kv_length, scale, tables, ints, floats, MASKED, RAGGED, SCORE_MOD, SCORE_MOD_BACKWARD,
        MASK_MOD,
    )
    return weights, factor


@gluon.jit
def operand_of(x, acc, dtype: gl.constexpr):
    """x, rounded, as a factor of the products that are added to acc."""
    LAYOUT: gl.constexpr = layout_of_products(acc[0].shape[1])
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def add_to_dv(
    dv, raw, more, it, first, own_first, full, b, h, memory, lengths, mod_values,
    MASKED: gl.constexpr, RAGGED: gl.constexpr, SCORE_MOD: gl.constexpr,
    SCORE_MOD_BACKWARD: gl.constexpr, MASK_MOD: gl.constexpr, S_LAYOUT: gl.constexpr,
):
    """(dV with what one step adds, the raw products of the next, in flight).

    Args:
        raw: this step's, in flight, and nothing else is.
    """
    own_tiles, _, first_tiles, second_tiles, rows, first_full, second_full, factors = memory
    slot = it % STAGES
    raw = warpgroup_mma_wait(num_outstanding=0, deps=(raw,))
    named_barrier("arrive", OF_FIRST + slot, 288)
    mbarrier.wait(second_full.index(slot), (it // STAGES) & 1)
    lse2 = rows[0].index(slot).load(S_LAYOUT)
    weights, factor = weights_of_step(
        raw, lse2, first, own_first, full, b, h, lengths, mod_values, MASKED, RAGGED, SCORE_MOD,
        SCORE_MOD_BACKWARD, MASK_MOD, S_LAYOUT, False,
    )
    if it >= STAGES:
        named_barrier("sync", TAKEN + slot, 256)
    factors.index(slot).store(factor)
    named_barrier("arrive", PLACED + slot, 256)
    weights = operand_of(weights, dv, first_tiles[0].dtype)
    later = products_of_values(weights, second_tiles, slot, dv)
    raw = begin_products(it + 1, more, own_tiles, first_tiles, first_full, 0, S_LAYOUT)
    dv = awaited(later, len(first_tiles))
    named_barrier("arrive", OF_SECOND + slot, 288)
    return dv, raw


@gluon.jit
def add_to_dk(dk, raw, more, it, memory, S_LAYOUT: gl.constexpr):
    """(dK with what one step adds, dout's products of the next, in flight).

    Args:
        raw: this step's, in flight, and nothing else is.
    """
    _, own_later_tiles, first_tiles, second_tiles, rows, _, second_full, factors = memory
    slot = it % STAGES
    raw = warpgroup_mma_wait(num_outstanding=0, deps=(raw,))
    dweights = raw - rows[1].index(slot).load(S_LAYOUT)
    named_barrier("arrive", OF_SECOND + slot, 288)
    # The other one has had this step's scores by then, so the query rows are there.
    named_barrier("sync", PLACED + slot, 256)
    ds = factors.index(slot).load(S_LAYOUT) * dweights
    named_barrier("arrive", TAKEN + slot, 256)
    ds = operand_of(ds, dk, first_tiles[0].dtype)
    later = products_of_values(ds, first_tiles, slot, dk)
    raw = begin_products(it + 1, more, own_later_tiles, second_tiles, second_full, 0, S_LAYOUT)
    dk = awaited(later, len(second_tiles))
    named_barrier("arrive", OF_FIRST + slot, 288)
    return dk, raw


@gluon.jit
def add_to_dq(
    dq, raw, more, it, first, own_first, lse2, delta, full, b, h, memory, lengths, mod_values,
    ME: gl.constexpr, MASKED: gl.constexpr, RAGGED: gl.constexpr, SCORE_MOD: gl.constexpr,
    SCORE_MOD_BACKWARD: gl.constexpr, MASK_MOD: gl.constexpr, S_LAYOUT: gl.constexpr,
):
    """(dQ with what one step adds, the raw products of the next, in flight).

    Args:
        raw: this step's, in flight, and nothing else is.
        lse2, delta: [64, 1].
    """
    own_tiles, own_later_tiles, first_tiles, second_tiles, _, first_full, second_full, _ = memory
    slot = it % STAGES
    # Before the next products are issued: unless this wait leaves none in flight, ptxas takes what
    # came round the loop for unfinished, and makes every product wait for the one before (C7514).
    raw = warpgroup_mma_wait(num_outstanding=0, deps=(raw,))
    dweights = begin_products(
        it, True, own_later_tiles, second_tiles, second_full, ME, S_LAYOUT,
    )
    _, factor = weights_of_step(
        raw, lse2, first, own_first, full, b, h, lengths, mod_values, MASKED, RAGGED, SCORE_MOD,
        SCORE_MOD_BACKWARD, MASK_MOD, S_LAYOUT, True,
    )
    dweights = warpgroup_mma_wait(num_outstanding=0, deps=(dweights,))
    # Of the one slot.
    named_barrier("arrive", OF_SECOND, 288)
    ds = operand_of(factor * (dweights - delta), dq, first_tiles[0].dtype)
    later = products_of_values(ds, first_tiles, slot, dq)
    raw = begin_products(it + 1, more, own_tiles, first_tiles, first_full, ME, S_LAYOUT)
    # All but the next step's scores.
    dq = awaited(later, len(first_tiles))
    named_barrier("arrive", OF_FIRST + slot, 288)
    return dq, raw


@gluon.jit
def consume_steps(
    acc, it, start, stop, own_first, lse2, delta, full, b, h, memory, lengths, mod_values,
    ME: gl.constexpr, MASKED: gl.constexpr, RAGGED: gl.constexpr, SCORE_MOD: gl.constexpr,
    SCORE_MOD_BACKWARD: gl.constexpr, MASK_MOD: gl.constexpr, S_LAYOUT: gl.constexpr,
    GRADIENT: gl.constexpr,
):
    """The gradient and the count of steps, after those from start to stop, one or more."""
    own_tiles, own_later_tiles, first_tiles, second_tiles, _, first_full, second_full, _ = memory
    if GRADIENT == "k":
        raw = begin_products(it, True, own_later_tiles, second_tiles, second_full, 0, S_LAYOUT)
    else:
        raw = begin_products(it, True, own_tiles, first_tiles, first_full, ME, S_LAYOUT)
    for i in range(start, stop):
        if GRADIENT == "v":
            acc, raw = add_to_dv(
                acc, raw, i + 1 < stop, it, i * STEP, own_first, full, b, h, memory, lengths,
                mod_values, MASKED, RAGGED, SCORE_MOD, SCORE_MOD_BACKWARD, MASK_MOD, S_LAYOUT,
            )
        elif GRADIENT == "k":
            acc, raw = add_to_dk(acc, raw, i + 1 < stop, it, memory, S_LAYOUT)
        else:
            acc, raw = add_to_dq(
                acc, raw, i + 1 < stop, it, i * STEP, own_first, lse2, delta, full, b, h, memory,
                lengths, mod_values, ME, MASKED, RAGGED, SCORE_MOD, SCORE_MOD_BACKWARD, MASK_MOD,
                S_LAYOUT,
            )
        it += 1
    # Of no step: what the last one has begun.
    warpgroup_mma_wait(num_outstanding=0, deps=(raw,))
    return acc, it


@gluon.jit
def consume_pass(
    acc, it, run, last_run, runs, steps, whole, own_first, lse2, delta, b, h, memory, lengths,
    mod_values, ME: gl.constexpr, MASKED: gl.constexpr, RAGGED: gl.constexpr,
    SCORE_MOD: gl.constexpr, SCORE_MOD_BACKWARD: gl.constexpr, MASK_MOD: gl.constexpr,
    HAS_MASK: gl.constexpr, STEPS_A_BLOCK: gl.constexpr, S_LAYOUT: gl.constexpr,
    GRADIENT: gl.constexpr,
):
    """The gradient and the count of steps, after one head's steps that are MASKED, or after the
    others: two loops, of which the second has no mask's code."""
    if HAS_MASK:
        HAS_MASK_MOD: gl.constexpr = MASK_MOD is not None
        for r in range(run, last_run):
            # Not a step ahead: see `hopper_backward.consume_pass`.
            begin, end, full = run_at(runs, r, steps, STEPS_A_BLOCK, HAS_MASK_MOD)
            start, stop = steps_of(begin, end, full, whole, MASKED)
            if start < stop:
                acc, it = consume_steps(
                    acc, it, start, stop, own_first, lse2, delta, full, b, h, memory, lengths,
                    mod_values, ME, MASKED, RAGGED, SCORE_MOD, SCORE_MOD_BACKWARD, MASK_MOD,
                    S_LAYOUT, GRADIENT,
                )
    else:
        start, stop = steps_of(gl.to_tensor(0), steps, True, whole, MASKED)
        if start < stop:
            acc, it = consume_steps(
                acc, it, start, stop, own_first, lse2, delta, True, b, h, memory, lengths,
                mod_values, ME, MASKED, RAGGED, SCORE_MOD, SCORE_MOD_BACKWARD, MASK_MOD, S_LAYOUT,
                GRADIENT,
            )
    return acc, it


@gluon.jit
def rows_of(row_values, unit, own_first, units, padded_length, S_LAYOUT: gl.constexpr):
    """(lse2 [64, 1], delta [64, 1], whether some row is far) of query rows, which are padded."""
    at = gl.cast(unit, gl.int64) * padded_length + own_first
    at = at + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    lse2 = gl.load(row_values + at)
    delta = gl.load(row_values + gl.cast(units, gl.int64) * 3 * padded_length + at)
    far = gl.max(gl.where(lse2 != lse2, 1, 0), 0)
    return gl.expand_dims(lse2, 1), gl.expand_dims(delta, 1), far


@gluon.jit
def consume(
    out_descs, row_values, odd, words, out_tiles, own_full, memory, mask, sizes, padded_length,
    mod_values, ME: gl.constexpr, SCORE_MOD: gl.constexpr, SCORE_MOD_BACKWARD: gl.constexpr,
    MASK_MOD: gl.constexpr, HAS_MASK: gl.constexpr, OWN_BLOCK: gl.constexpr,
    STEP_BLOCK: gl.constexpr, GROUP: gl.constexpr, KV_SHARED: gl.constexpr, RAGGED: gl.constexpr,
    GRADIENT: gl.constexpr,
):
    """A gradient of 64 rows, of dQ number ME of two."""
    offsets, ends, runs, mask_strides = mask
    batch, heads, kv_heads, units, q_length, kv_length, tiles, head_group = sizes
    OF_QUERIES: gl.constexpr = GRADIENT == "q"
    ROWS: gl.constexpr = 128 if OF_QUERIES else 64
    TILES_A_BLOCK: gl.constexpr = OWN_BLOCK // ROWS
    STEPS_A_BLOCK: gl.constexpr = STEP_BLOCK // STEP if HAS_MASK else 1
    S_LAYOUT: gl.constexpr = layout_of_products(STEP)
    HAS_MASK_MOD: gl.constexpr = MASK_MOD is not None
    own_heads = heads if OF_QUERIES else kv_heads
    tile, own_b, own_h = tile_of_this(tiles, units, own_heads, head_group, OF_QUERIES)
    unit = own_b * own_heads + own_h
    own_first = tile * ROWS + ME * 64
    steps, whole = whole_steps(
        tile, q_length, kv_length, RAGGED, SCORE_MOD is not None, OF_QUERIES,
    )
    if OF_QUERIES:
        lse2, delta, far = rows_of(row_values, unit, own_first, units, padded_length, S_LAYOUT)
    else:
        lse2, delta, far = None, None, None
    lengths = (q_length, kv_length)
    acc = zeros_of_parts(out_descs)
    it = gl.to_tensor(0)
    mbarrier.wait(own_full, 0)
    for stream in range(streams_of(batch, GROUP, KV_SHARED, OF_QUERIES)):
        b, h = head_of(stream, own_b, own_h, GROUP, KV_SHARED, OF_QUERIES)
        run, last_run = runs_of(offsets, ends, mask_strides, b, h, tile, HAS_MASK, TILES_A_BLOCK)
        if HAS_MASK_MOD or RAGGED:
            acc, it = consume_pass(
                acc, it, run, last_run, runs, steps, whole, own_first, lse2, delta, b, h, memory,
                lengths, mod_values, ME, True, RAGGED, SCORE_MOD, SCORE_MOD_BACKWARD, MASK_MOD,
                HAS_MASK, STEPS_A_BLOCK, S_LAYOUT, GRADIENT,
            )
        acc, it = consume_pass(
            acc, it, run, last_run, runs, steps, whole, own_first, lse2, delta, b, h, memory,
            lengths, mod_values, ME, False, RAGGED, SCORE_MOD, SCORE_MOD_BACKWARD, MASK_MOD,
            HAS_MASK, STEPS_A_BLOCK, S_LAYOUT, GRADIENT,
        )
    if GRADIENT == "v":
        # No barrier is left half full.
        for last in range(gl.maximum(it - STAGES, 0), it):
            named_barrier("sync", TAKEN + last % STAGES, 256)
    if OF_QUERIES:
        # What isn't finite in a value, and a mod, may make anything of rows past the end.
        acc = all_inside(acc, own_first, q_length)
    # Whether `repair_kernel` has to take these rows again.
    fine = is_finite(acc[0])
    if len(acc) > 1:
        fine = fine & is_finite(acc[1])
    if OF_QUERIES:
        # Of a score mod without a slope by the score far rows' gradients are 0.
        fine = fine & (far == 0)
    found = gl.where(fine, 0, 1)
    if GRADIENT == "k":
        say(words, 0, found, 4)
        # The other one, which has seen the last steps taken, places nothing any more.
        named_barrier("arrive", PLACED, 256)
    elif GRADIENT == "v":
        named_barrier("sync", PLACED, 256)
        gl.store(odd + unit * tiles + tile, found | said(words, 0))
    else:
        gl.store(odd + (unit * tiles + tile) * 2 + ME, found)
    # Where dK goes the other one reads keys: for scores, the last of which came before it placed
    # the last factors, and ahead of no step, for products of anything. Where dV goes values are
    # read, and the other one has just said that it is done.
    place_parts(acc if GRADIENT == "v" else scaled(acc, mod_values[1]), out_tiles, ME, False)
    fence_async_shared()
    store_parts(out_descs, out_tiles, ME, own_b, own_h, own_first)
    tma.store_wait(0)


@gluon.jit
def zeros_of_parts(descs):
    """Sums of each part at first."""
    found = descs[:0]
    for p in gl.static_range(len(descs)):
        found = found + (zeros_of(descs[p].block_shape[3]),)
    return found


@gluon.jit
def inside(acc, first, end):
    """A part, 0 in rows past the end."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, layout_of_products(acc.shape[1]))
    rows = first + gl.arange(0, 64, layout=OF_ROWS)
    return gl.where(gl.expand_dims(rows < end, 1), acc, 0.0)


@gluon.jit
def all_inside(acc, first, end):
    """`inside` of each part."""
    found = acc[:0]
    for p in gl.static_range(len(acc)):
        found = found + (inside(acc[p], first, end),)
    return found


@gluon.jit
def scaled(acc, scale):
    """Each part with that factor."""
    found = acc[:0]
    for p in gl.static_range(len(acc)):
        found = found + (acc[p] * scale,)
    return found


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """That many, each for one arrival."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=1)
    return found


@gluon.jit
def key_kernel(
    key, key_2, value, value_2, query, query_2, dout, dout_2, dk, dk_2, dv, dv_2, row_values,
    odd_keys, offsets, ends, runs, mask_strides, tables, ints, floats, shifts, scale, batch, heads,
    kv_heads, units, q_length, kv_length, tiles, head_group, SCORE_MOD: gl.constexpr,
    SCORE_MOD_BACKWARD: gl.constexpr, MASK_MOD: gl.constexpr, HAS_MASK: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, GROUP: gl.constexpr, KV_SHARED: gl.constexpr,
    RAGGED: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
):
    """dK and dV, of 64 keys a program.

    Args:
        key, value, query, dout, dk, dv: descriptors [B, H, length, E or Ev] of boxes of 64 rows
            and so many columns as the first of `forward_call.parts_of`; with _2 of the second,
            None where there is none.
        row_values: descriptor [4 * B * Hq, padded L] of boxes [1, 64]: of
            `backward_rows.prepare_kernel`.
        odd_keys: int32 [Bkv * Hkv, tiles], filled: of 64 keys each, 1 where some dk or dv isn't
            finite.
        offsets, ends, runs: of the transposed mask. Both blocks are multiples of 64.
        units: Bkv * Hkv; head_group: of these, those that run at a time.
        RAGGED: kv_length is no multiple of 64, or q_length none and there is a score mod.
    """
    k_descs = descriptors(key, key_2)
    v_descs = descriptors(value, value_2)
    q_descs = descriptors(query, query_2)
    do_descs = descriptors(dout, dout_2)
    dk_descs = descriptors(dk, dk_2)
    dv_descs = descriptors(dv, dv_2)
    k_tiles = buffers(k_descs, 1)
    v_tiles = buffers(v_descs, 1)
    q_tiles = buffers(q_descs, STAGES)
    do_tiles = buffers(do_descs, STAGES)
    lse_rows = gl.allocate_shared_memory(gl.float32, [STAGES, 1, STEP], row_values.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [STAGES, 1, STEP], row_values.layout)
    # Two of a thread's neighbours at a time, eight rows of a warp at other banks each.
    OF_FACTORS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    factors = gl.allocate_shared_memory(gl.float32, [STAGES, 64, STEP], OF_FACTORS)
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    # Whether dK has to be made again.
    words = gl.allocate_shared_memory(gl.int32, [1, 1], word)
    kv_full = barriers(1)
    q_full = barriers(STAGES)
    do_full = barriers(STAGES)
    fence_async_shared()
    rows = (lse_rows, delta_rows)
    memory = (k_tiles, v_tiles, q_tiles, do_tiles, rows, q_full, do_full, factors)
    mask = (offsets, ends, runs, mask_strides)
    sizes = (batch, heads, kv_heads, units, q_length, kv_length, tiles, head_group)
    mod_values = (shifts, scale, tables, ints, floats)
    gl.warp_specialize(
        [
            (consume, (
                dv_descs, None, odd_keys, words, v_tiles, kv_full.index(0), memory, mask, sizes,
                None, mod_values, 0, SCORE_MOD, SCORE_MOD_BACKWARD, MASK_MOD, HAS_MASK, KV_BLOCK,
                Q_BLOCK, GROUP, KV_SHARED, RAGGED, "v",
            )),
            (consume, (
                dk_descs, None, odd_keys, words, k_tiles, kv_full.index(0), memory, mask, sizes,
                None, mod_values, 0, SCORE_MOD, SCORE_MOD_BACKWARD, MASK_MOD, HAS_MASK,
                KV_BLOCK, Q_BLOCK, GROUP, KV_SHARED, RAGGED, "k",
            )),
            (produce, (
                (k_descs, v_descs), (q_descs, do_descs, row_values),
                (k_tiles, v_tiles, kv_full.index(0)), (q_tiles, do_tiles, rows, q_full, do_full),
                mask, sizes, SCORE_MOD is not None, MASK_MOD is not None, HAS_MASK, KV_BLOCK,
                Q_BLOCK, GROUP, KV_SHARED, RAGGED, D, DV, False,
            )),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def query_kernel(
    query, query_2, dout, dout_2, key, key_2, value, value_2, dq, dq_2, row_values, odd_rows,
    offsets, ends, runs, mask_strides, tables, ints, floats, shifts, scale, batch, heads, kv_heads,
    units, q_length, kv_length, padded_length, tiles, head_group, SCORE_MOD: gl.constexpr,
    SCORE_MOD_BACKWARD: gl.constexpr, MASK_MOD: gl.constexpr, HAS_MASK: gl.constexpr,
    Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, GROUP: gl.constexpr, KV_SHARED: gl.constexpr,
    RAGGED: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
):
    """dQ, of 128 query rows a program.

    Args:
        query, dout, key, value, dq: as of `key_kernel`.
        row_values: float32 [4, B, Hq, padded_length], of `backward_rows.prepare_kernel`.
        odd_rows: int32 [B * Hq, tiles * 2], filled: of 64 rows each, 1 where `repair_kernel` has
            to make dQ again.
        offsets, ends, runs: of the mask. Q_BLOCK is a multiple of 128, KV_BLOCK of 64.
        units: B * Hq; head_group: of these, those that run at a time.
        RAGGED: kv_length is no multiple of 64.
    """
    q_descs = descriptors(query, query_2)
    do_descs = descriptors(dout, dout_2)
    k_descs = descriptors(key, key_2)
    v_descs = descriptors(value, value_2)
    dq_descs = descriptors(dq, dq_2)
    q_tiles = buffers(q_descs, 2)
    do_tiles = buffers(do_descs, 2)
    k_tiles = buffers(k_descs, STAGES)
    v_tiles = buffers(v_descs, 1)
    q_full = barriers(1)
    k_full = barriers(STAGES)
    v_full = barriers(1)
    fence_async_shared()
    memory = (q_tiles, do_tiles, k_tiles, v_tiles, None, k_full, v_full, None)
    mask = (offsets, ends, runs, mask_strides)
    sizes = (batch, heads, kv_heads, units, q_length, kv_length, tiles, head_group)
    mod_values = (shifts, scale, tables, ints, floats)
    gl.warp_specialize(
        [
            (consume, (
                dq_descs, row_values, odd_rows, None, q_tiles, q_full.index(0), memory, mask,
                sizes, padded_length, mod_values, 0, SCORE_MOD, SCORE_MOD_BACKWARD, MASK_MOD,
                HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP, KV_SHARED, RAGGED, "q",
            )),
            (consume, (
                dq_descs, row_values, odd_rows, None, q_tiles, q_full.index(0), memory, mask,
                sizes, padded_length, mod_values, 1, SCORE_MOD, SCORE_MOD_BACKWARD, MASK_MOD,
                HAS_MASK, Q_BLOCK, KV_BLOCK, GROUP, KV_SHARED, RAGGED, "q",
            )),
            (produce, (
                (q_descs, do_descs), (k_descs, v_descs, None),
                (q_tiles, do_tiles, q_full.index(0)), (k_tiles, v_tiles, None, k_full, v_full),
                mask, sizes, SCORE_MOD is not None, MASK_MOD is not None, HAS_MASK, Q_BLOCK,
                KV_BLOCK, GROUP, KV_SHARED, RAGGED, D, DV, True,
            )),
        ],
        [4, 1],
        [240, 24],
    )
