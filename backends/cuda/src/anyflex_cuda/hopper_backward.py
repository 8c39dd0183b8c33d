"""Backward on Hopper: dK, dV and dQ of 128 keys at a time, over the query rows that see them.

A program has a producer of one warp, which loads by TMA, and two consumers of four warps, which
own 64 keys each: FlashAttention-3's division (Shah et al., 2024). Scores are transposed, keys by
query rows, so that weights and their gradients are register operands of the products that make dV
and dK. A step's dQ is made from both consumers' score gradients, and TMA adds it to float32 sums,
one step later: by then the other consumer's have long been written, so that consumers may be most
of a step apart, and one's products overlap the other's softmax. A step ends with the next step's
scores in flight.

`backward_rows.prepare_kernel` runs before it, `convert_kernel` and `repair_kernel` after it. Where
KV heads are split, programs store float32 sums, and `anyflex_triton.backward_keys.sum_kernel`
makes dK and dV of them.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core as core
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anyflex_cuda.apply_mods import weights_of
from anyflex_cuda.kernel_records import MaskRuns
from anyflex_cuda.smem_mailbox import named_barrier, said, say
from anyflex_cuda.split_tiles import layout_of_products, load_box, reinterpret, store_box
from anyflex_cuda.write_softmax_stats import larger
from anyflex_triton.device_functions import ModGradients, ModInputs, Mods, record

__all__ = ["KEYS", "KeyGrid", "backward_kernel"]


@record
class StepLoads:
    """Descriptors of query rows, dout and row values: arguments of `backward_kernel`."""

    query: Any
    dout: Any
    row_values: Any


@record
class StepMemory:
    """Query rows, dout and row values of STAGES steps in shared memory, and barriers.

    Attributes:
        q_full: barriers; query rows and lse_rows are loaded. do_full: dout and delta_rows are.
    """

    q_tiles: Any
    do_tiles: Any
    lse_rows: Any
    delta_rows: Any
    q_full: Any
    do_full: Any
    BLOCK_M: Any
    D: Any
    DV: Any


@record
class KeyMemory:
    """Keys and values of a tile in shared memory, the tile's number, and barriers.

    Attributes:
        full: barrier; a tile is loaded. empty: both consumers have read it.
    """

    k_tiles: Any
    v_tiles: Any
    words: Any
    full: Any
    empty: Any


@record
class DqMemory:
    """Score gradients and dQ in shared memory, and the descriptor of the sums of dQ.

    Attributes:
        desc: `backward_kernel`'s argument dq_sums.
    """

    ds_tiles: Any
    dq_tiles: Any
    desc: Any
    WANT_DQ: Any


@record
class KeyGrid:
    """Sizes of the grid of tiles: arguments of `backward_kernel`."""

    batch: Any
    heads: Any
    kv_heads: Any
    units: Any
    q_length: Any
    kv_length: Any
    tiles: Any
    head_group: Any
    head_splits: Any
    split_heads: Any
    GROUP: Any
    KV_SHARED: Any
    RAGGED: Any


@record
class BackwardCall:
    """Arguments of a consumer.

    Attributes:
        memory, keys, dq, mask, grid: `StepMemory`, `KeyMemory`, `DqMemory`, `MaskRuns`, `KeyGrid`.
        mods, gradients: `Mods` and `ModGradients` of `anyflex_triton.kernel_records`.
        The others are arguments of `backward_kernel`.
    """

    dk_desc: Any
    dv_desc: Any
    key_sums: Any
    dq: Any
    odd_keys: Any
    memory: Any
    keys: Any
    mask: Any
    grid: Any
    tables: Any
    mods: Any
    gradients: Any


@record
class StepHead:
    """Query head of a step.

    Attributes:
        bh: number of the head, counted over all batch entries.
        n0: this consumer's first key.
    """

    b: Any
    h: Any
    bh: Any
    n0: Any


@record
class KeySums:
    """Accumulators of a consumer's keys after some steps.

    Attributes:
        last_bh, last_rows: coordinates of the previous step's dQ; negative before a tile's first
            step.
    """

    dk: Any
    dv: Any
    last_bh: Any
    last_rows: Any


# Argument lists would be a line an argument.
# fmt: off

KEYS = 128
"""Keys of a tile, 64 for each consumer."""
STAGES = gl.constexpr(2)
"""Pipeline stages: steps whose query rows and dout are in shared memory. A step's stay until the
next step's scores are issued."""
DS_STAGES = gl.constexpr(3)
"""Pipeline stages of score gradients: while one consumer writes a step's, the other may read those
of two steps before."""
FULL_RUN = gl.constexpr(1)

# Numbers of named barriers: one for each slot of query rows, at most two; and for score gradients
# that the other consumer has written one for each consumer and parity of the step.
OF_ROWS = gl.constexpr(8)
OF_DS = gl.constexpr(10)

if hasattr(tma, "async_atomic_add"):
    _add = tma.async_atomic_add
else:
    from triton._C.libtriton import ir

    @core.builtin
    def _add(tensor_desc, coord, src, _semantic=None):
        """Add a box by TMA. Triton before 3.8 has the operation and its builder, but not this
        function."""
        places = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(
            ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, places, src.handle
        )


@gluon.jit
def now(x):
    """Return x, and hide from compilers that it is loop invariant, so that addresses computed from
    it aren't kept in registers through the loop. Without this, head dim 128 under a causal mask
    spilled 30 registers a step."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


# Shared by producer and consumers: tiles, runs, steps


@gluon.jit
def tile_of(index, grid):
    """Return (tile, head) of keys. A few heads run at a time, so that L2 holds their query rows
    and sums of dQ; their first tiles, the longest under causal masks, come first."""
    group = index // (grid.head_group * grid.tiles)
    first = group * grid.head_group
    size = gl.minimum(grid.head_group, grid.units - first)
    rest = index - first * grid.tiles
    return rest // size, first + rest % size


@gluon.jit
def whole_steps(tile, grid, HAS_SCORE_MOD: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return (number of a head's steps, number of those at its begin that have no row or key past
    the end).

    Rows past the end have lse +inf and thus weight 0, unless a score mod makes their scores
    non-finite.
    """
    steps = gl.cdiv(grid.q_length, BLOCK_M)
    if grid.RAGGED:
        whole = grid.q_length // BLOCK_M if HAS_SCORE_MOD else steps
        whole = gl.where((tile + 1) * 128 > grid.kv_length, 0, whole)
        return steps, whole
    else:
        return steps, steps


@gluon.jit
def steps_of_run(
    mask, r, steps, whole, STEPS_A_BLOCK: gl.constexpr, HAS_MASK_MOD: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Return (begin, end, whether the mask mod isn't evaluated) of a run's steps that need mask
    code (MASKED), or of its others; an empty range may end before it begins. Without a mask, one
    run has all `steps`."""
    begin = gl.to_tensor(0)
    end = steps
    full = gl.to_tensor(True)
    if mask.HAS_MASK:
        at = mask.runs + r * 3
        begin = gl.load(at) * STEPS_A_BLOCK
        end = gl.minimum(gl.load(at + 1) * STEPS_A_BLOCK, steps)
        if HAS_MASK_MOD:
            full = gl.load(at + 2) == FULL_RUN
    if MASKED:
        return gl.where(full, gl.maximum(begin, whole), begin), end, full
    else:
        return begin, gl.where(full, gl.minimum(end, whole), begin), full


@gluon.jit
def row_of_step(i, rotation, stop, BLOCK_M: gl.constexpr, ROTATED: gl.constexpr):
    """Return a step's first query row. Without a mask, tiles begin at different rows, so that they
    don't all add to the same sums of dQ."""
    if ROTATED:
        i = i + rotation
        i = gl.where(i >= stop, i - stop, i)
    return i * BLOCK_M


@gluon.jit
def kv_head_of(unit, grid):
    """Return (batch entry, KV head) of a unit: a KV head, or one of its splits."""
    if grid.head_splits is not None:
        unit = unit // grid.head_splits
    return unit // grid.kv_heads, unit % grid.kv_heads


@gluon.jit
def streams_of(unit, grid):
    """Return (first, end) of the query heads that a unit takes, among those that read its KV
    head."""
    streams = grid.GROUP * grid.batch if grid.KV_SHARED else grid.GROUP
    if grid.head_splits is None:
        return 0, streams
    else:
        first = unit % grid.head_splits * grid.split_heads
        return first, gl.minimum(first + grid.split_heads, streams)


@gluon.jit
def head_of_stream(stream, kv_b, kv_head, grid):
    """Return (batch entry, query head) of one of the query heads that read a KV head."""
    b = stream // grid.GROUP if grid.KV_SHARED else kv_b
    return b, kv_head * grid.GROUP + stream % grid.GROUP


@gluon.jit
def runs_of(mask, b, h, tile, TILES_A_BLOCK: gl.constexpr):
    """Return (first, end) of a tile's runs."""
    if mask.HAS_MASK:
        at = b * mask.strides[0] + h * mask.strides[1] + tile // TILES_A_BLOCK
        return gl.load(mask.offsets + at), gl.load(mask.ends + at)
    else:
        return gl.to_tensor(0), gl.to_tensor(1)


# Producer


@gluon.jit
def await_rows(slot):
    """Wait until both consumers have read a slot's query rows."""
    named_barrier("sync", OF_ROWS + slot, 288, 1)


@gluon.jit
def load_step(it, m0, b, h, bh, batch_heads, loads, memory):
    slot = it % STAGES
    BLOCK_M: gl.constexpr = memory.BLOCK_M
    if it >= STAGES:
        await_rows(slot)
    full = memory.q_full.index(slot)
    mbarrier.expect(full, BLOCK_M * memory.D * 2 + BLOCK_M * 4)
    load_box(loads.query, [b, h, m0, 0], full, memory.q_tiles.index(slot))
    load_box(loads.row_values, [bh, m0], full, memory.lse_rows.index(slot))
    # Its slot was released together with the query rows'.
    full = memory.do_full.index(slot)
    mbarrier.expect(full, BLOCK_M * memory.DV * 2 + BLOCK_M * 4)
    load_box(loads.dout, [b, h, m0, 0], full, memory.do_tiles.index(slot))
    load_box(loads.row_values, [3 * batch_heads + bh, m0], full, memory.delta_rows.index(slot))


@gluon.jit
def load_pass(
    it, run, last_run, steps, whole, rotation, b, h, loads, memory, mask, grid,
    MASKED: gl.constexpr, HAS_MASK_MOD: gl.constexpr,
):
    """Load the steps that `consume_pass` takes."""
    BLOCK_M: gl.constexpr = memory.BLOCK_M
    STEPS_A_BLOCK: gl.constexpr = mask.Q_BLOCK // BLOCK_M if mask.HAS_MASK else 1
    batch_heads = grid.batch * grid.heads
    bh = b * grid.heads + h
    for r in range(run, last_run):
        start, stop, _ = steps_of_run(mask, r, steps, whole, STEPS_A_BLOCK, HAS_MASK_MOD, MASKED)
        for i in range(start, stop):
            m0 = row_of_step(i, rotation, stop, BLOCK_M, not MASKED and not mask.HAS_MASK)
            load_step(it, m0, b, h, bh, batch_heads, loads, memory)
            it += 1
    return it


@gluon.jit
def produce(
    loads, k_desc, v_desc, counter, memory, keys, mask, grid, HAS_SCORE_MOD: gl.constexpr,
    HAS_MASK_MOD: gl.constexpr, DYNAMIC: gl.constexpr,
):
    """Load keys and values of each tile, then query rows, dout and row values step by step."""
    it = gl.to_tensor(0)
    count = gl.to_tensor(0)
    total = grid.tiles * grid.units
    index = gl.program_id(0)
    while index < total:
        tile, unit = tile_of(index, grid)
        kv_b, kv_head = kv_head_of(unit, grid)
        steps, whole = whole_steps(tile, grid, HAS_SCORE_MOD, memory.BLOCK_M)
        # Wait until the consumers have read the previous tile's keys and values, and TMA has
        # stored dV, and dK where there is no dQ, from these buffers.
        mbarrier.wait(keys.empty, (count & 1) ^ 1)
        say(keys.words, 0, index)
        mbarrier.expect(keys.full, 128 * (memory.D + memory.DV) * 2)
        for half in gl.static_range(2):
            at = [kv_b, kv_head, tile * 128 + half * 64, 0]
            load_box(k_desc, at, keys.full, keys.k_tiles.index(half))
        for half in gl.static_range(2):
            at = [kv_b, kv_head, tile * 128 + half * 64, 0]
            load_box(v_desc, at, keys.full, keys.v_tiles.index(half))
        first, end = streams_of(unit, grid)
        for stream in range(first, end):
            b, h = head_of_stream(stream, kv_b, kv_head, grid)
            run, last_run = runs_of(mask, b, h, tile, mask.KV_BLOCK // 128)
            if HAS_MASK_MOD or grid.RAGGED:
                it = load_pass(
                    it, run, last_run, steps, whole, 0, b, h, loads, memory, mask, grid, True,
                    HAS_MASK_MOD,
                )
            rotation = tile * whole // grid.tiles
            it = load_pass(
                it, run, last_run, steps, whole, rotation, b, h, loads, memory, mask, grid, False,
                HAS_MASK_MOD,
            )
        if DYNAMIC:
            # The next tile is taken when this one is loaded, two steps before the consumers end
            # it.
            index = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        else:
            index += gl.num_programs(0)
        count += 1
    mbarrier.wait(keys.empty, (count & 1) ^ 1)
    say(keys.words, 0, index)
    mbarrier.arrive(keys.full, count=1)
    # Wait for the last slots, so that no barrier is left mid-phase.
    for last in range(gl.maximum(it - STAGES, 0), it):
        await_rows(last % STAGES)


# Consumers


@gluon.jit
def indices_of_step(m0, n0, call, MASKED: gl.constexpr):
    """Return (q_idx [1, BLOCK_M], kv_idx [64, 1]) as mods get them."""
    BLOCK_M: gl.constexpr = call.memory.BLOCK_M
    S_LAYOUT: gl.constexpr = layout_of_products(BLOCK_M)
    grid = call.grid
    shifts = call.mods.shifts
    columns = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, S_LAYOUT))
    keys = n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    if MASKED and grid.RAGGED:
        q_idx = gl.expand_dims(gl.minimum(m0 + columns, grid.q_length - 1) + shifts[2], 0)
        kv_idx = gl.expand_dims(gl.minimum(keys, grid.kv_length - 1) + shifts[3], 1)
    else:
        # `now` makes one sum for all columns; compilers would add its terms to each column.
        q_idx = gl.expand_dims(columns + now(m0 + shifts[2]), 0)
        kv_idx = gl.expand_dims(keys + shifts[3], 1)
    return q_idx, kv_idx


@gluon.jit
def tables_of_step(m0, head, call, MASKED: gl.constexpr):
    """Return `call.tables` with the captured values that are read for a step's pairs at once."""
    mods = call.mods
    if mods.READ is None:
        return call.tables
    else:
        q_idx, _ = indices_of_step(m0, head.n0, call, MASKED)
        return mods.READ(
            head.b + mods.shifts[0], head.h + mods.shifts[1], q_idx, head.n0 + mods.shifts[3],
            call.tables, mods.ints, mods.floats, 64,
        )


@gluon.jit
def in_order_of_threads(x):
    """Return [64, 64] in the layout of a product as [128, 32] in the order of threads: each thread
    has 4 neighbours and 8 threads have a row, so that each store is of 16 bytes. In row-major
    order stores would have two-way bank conflicts. `backward_rows.summed_rows` is the inverse."""
    # Axes: rows by 16, by 8, by 2 and by 1; columns by 8, by 2 and by 1.
    parts = x.reshape([4, 2, 4, 2, 8, 4, 2])
    return parts.permute((4, 0, 2, 3, 5, 1, 6)).reshape([128, 32])


@gluon.jit
def begin_scores(it, there, memory, keys, ME: gl.constexpr):
    """Return the product of keys and a step's query rows, in flight. Unless the step is `there`,
    this doesn't wait for its rows, and the product is undefined."""
    BLOCK_M: gl.constexpr = memory.BLOCK_M
    slot = it % STAGES
    k = keys.k_tiles.index(now(gl.to_tensor(ME))).reshape([64, memory.D])
    q = memory.q_tiles.index(slot).reshape([BLOCK_M, memory.D])
    mbarrier.wait(memory.q_full.index(slot), (it // STAGES) & 1, pred=there)
    zeros = gl.full([64, BLOCK_M], 0.0, gl.float32, layout=layout_of_products(BLOCK_M))
    return warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def begin_dq(it, ds_tiles, k_tiles, ME: gl.constexpr, D: gl.constexpr):
    """Return the product that makes this consumer's part of step `it`'s dQ, in flight: 64 columns
    where D is 128, else 64 of the 128 rows."""
    pair = it % DS_STAGES * 2
    first = now(gl.to_tensor(0))
    k0 = k_tiles.index(first).reshape([64, D])
    k1 = k_tiles.index(first + 1).reshape([64, D])
    ds0 = ds_tiles.index(pair)
    ds1 = ds_tiles.index(pair + 1)
    if D == 128:
        k0 = k0.slice(ME * 64, 64, dim=1)
        k1 = k1.slice(ME * 64, 64, dim=1)
    else:
        ds0 = ds0.slice(ME * 64, 64, dim=1)
        ds1 = ds1.slice(ME * 64, 64, dim=1)
    nothing = gl.full([64, 64], 0.0, gl.float32, layout=layout_of_products(64))
    dq = warpgroup_mma(ds0.permute((1, 0)), k0, nothing, use_acc=False, is_async=True)
    return warpgroup_mma(ds1.permute((1, 0)), k1, dq, is_async=True)


@gluon.jit
def wait_for_ds(it, there, ME: gl.constexpr):
    """Wait for both consumers' parts of step `it`'s score gradients, if the step is `there`."""
    if there:
        named_barrier("sync", OF_DS + 2 * (it & 1) + ME, 256)


@gluon.jit
def place_dq(dq, half, dq_tiles):
    """Write dQ to the buffer that TMA adds it from."""
    # Wait until TMA has read the previous dQ from this buffer.
    tma.store_wait(0)
    dq_tiles.index(half).reshape([128, 32]).store(in_order_of_threads(dq))


@gluon.jit
def add_step(
    sums, raw, more, it, m0, full, head, call, ME: gl.constexpr, MASKED: gl.constexpr,
):
    """Take one step, and issue the previous step's dQ. Return `KeySums` and the next step's raw
    products, in flight; these are undefined unless there are `more` steps.

    Where neither D nor BLOCK_M is 128, a consumer adds its own keys' part of dQ in the same step.

    Args:
        raw: this step's products, the only ones in flight.
        head: `StepHead`. call: `BackwardCall`.
    """
    memory = call.memory
    keys = call.keys
    mods = call.mods
    shifts = mods.shifts
    gradients = call.gradients
    ds_tiles = call.dq.ds_tiles
    dq_tiles = call.dq.dq_tiles
    q_length = call.grid.q_length
    kv_length = call.grid.kv_length
    last_bh = sums.last_bh
    last_rows = sums.last_rows
    BLOCK_M: gl.constexpr = memory.BLOCK_M
    D: gl.constexpr = memory.D
    DV: gl.constexpr = memory.DV
    RAGGED: gl.constexpr = call.grid.RAGGED
    S_LAYOUT: gl.constexpr = layout_of_products(BLOCK_M)
    K_LAYOUT: gl.constexpr = layout_of_products(D)
    V_LAYOUT: gl.constexpr = layout_of_products(DV)
    DQ_LAYOUT: gl.constexpr = layout_of_products(64)
    slot = it % STAGES
    phase = (it // STAGES) & 1
    ALONE: gl.constexpr = BLOCK_M == 64 and D == 64
    dtype: gl.constexpr = memory.q_tiles.dtype
    half = now(gl.to_tensor(ME))
    v = keys.v_tiles.index(half).reshape([64, DV])
    q = memory.q_tiles.index(slot).reshape([BLOCK_M, D])
    do = memory.do_tiles.index(slot).reshape([BLOCK_M, DV])
    zeros = gl.full([64, BLOCK_M], 0.0, gl.float32, layout=S_LAYOUT)
    tables = tables_of_step(m0, head, call, MASKED)
    # This wait stands before dout's product is issued. Unless it leaves none in flight, ptxas
    # treats the products carried around the loop as unfinished, and serializes all products
    # (C7514).
    raw = warpgroup_mma_wait(num_outstanding=0, deps=(raw,))
    mbarrier.wait(memory.do_full.index(slot), phase)
    dweights = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lse2 = memory.lse_rows.index(slot).load(S_LAYOUT)
    columns = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, S_LAYOUT))
    places = head.n0 + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    q_idx, kv_idx = indices_of_step(m0, head.n0, call, MASKED)
    weights, factor, scores = weights_of(
        raw, lse2, gl.expand_dims(m0 + columns, 0), gl.expand_dims(places, 1), full,
        ModInputs(
            b=head.b + shifts[0], h=head.h + shifts[1], q_idx=q_idx, kv_idx=kv_idx, tables=tables,
        ),
        q_length, kv_length, mods, gradients, MASKED, RAGGED,
    )
    # The conversion stands before the wait, which also keeps ptxas from sinking the exponentials
    # below it.
    rounded = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, V_LAYOUT, 2))
    dv = warpgroup_mma(rounded, do, sums.dv, is_async=True)
    dweights = warpgroup_mma_wait(num_outstanding=1, deps=(dweights,))
    dweights -= memory.delta_rows.index(slot).load(S_LAYOUT)
    if gradients.CAPTURED_GRADIENTS is not None:
        q_idx, kv_idx = indices_of_step(m0, head.n0, call, MASKED)
        # A dead pair has weight 0; no registers are free to keep which pairs are dead. Other pairs
        # of weight 0 add 0, or a non-finite value, and then dQ is non-finite too. `repair_kernel`
        # adds those values, and what far rows add, whose lse2 is NaN.
        of_scores = weights * dweights
        live = (weights != 0.0) & (lse2 < float("inf"))
        if mods.READ is None:
            gradients.CAPTURED_GRADIENTS(
                of_scores, scores, live, head.b + shifts[0], head.h + shifts[1], q_idx,
                kv_idx, call.tables, mods.ints, mods.floats, gradients.totals,
            )
        else:
            gradients.CAPTURED_GRADIENTS(
                of_scores, scores, live, head.b + shifts[0], head.h + shifts[1], q_idx,
                kv_idx, call.tables, mods.ints, mods.floats, gradients.totals,
                head.n0 + shifts[3], 64,
            )
    ds = (factor * dweights).to(dtype)
    operand = gl.convert_layout(ds, gl.DotOperandLayout(0, K_LAYOUT, 2))
    if call.dq.WANT_DQ:
        if ALONE:
            ds_tiles.index(half).store(ds)
            fence_async_shared()
            dk = warpgroup_mma(operand, q, sums.dk, is_async=True)
            k = keys.k_tiles.index(half).reshape([64, D])
            nothing = gl.full([64, 64], 0.0, gl.float32, layout=DQ_LAYOUT)
            ds0 = ds_tiles.index(half)
            dq = warpgroup_mma(ds0.permute((1, 0)), k, nothing, use_acc=False, is_async=True)
            dq, dv = warpgroup_mma_wait(num_outstanding=0, deps=(dq, dv))
        else:
            # Wait until the other consumer has read the slot that this step's score gradients are
            # written to.
            wait_for_ds(it - 1, last_rows >= 0, ME)
            place = it % DS_STAGES
            ds_tiles.index(place * 2 + half).store(ds)
            fence_async_shared()
            # The other consumer may be a step behind and still have to wait for the previous
            # step's.
            named_barrier("arrive", OF_DS + 2 * (it & 1) + (1 - ME), 256)
            # dQ is issued first, so that TMA adds it while dK is made. It is undefined in a tile's
            # first step.
            dq = begin_dq(it + (DS_STAGES - 1), ds_tiles, keys.k_tiles, ME, D)
            dk = warpgroup_mma(operand, q, sums.dk, is_async=True)
            dq, dv = warpgroup_mma_wait(num_outstanding=1, deps=(dq, dv))
        place_dq(dq, half, dq_tiles)
        # These scores aren't issued while dQ is in registers: there aren't enough for both, and
        # ptxas would serialize all products (C7512).
        raw = begin_scores(it + 1, more, memory, keys, ME)
        fence_async_shared()
        if ALONE:
            _add(call.dq.desc, [head.bh, m0 // 64 * 128, 0], dq_tiles.index(half))
        else:
            # A TMA addition at negative coordinates is an illegal instruction (seen on an H200).
            if last_rows >= 0:
                _add(call.dq.desc, [last_bh, last_rows, 0], dq_tiles.index(half))
            last_bh = head.bh
            last_rows = (m0 // 64 * (D // 64) + ME) * 128
    else:
        dk = warpgroup_mma(operand, q, sums.dk, is_async=True)
        raw = begin_scores(it + 1, more, memory, keys, ME)
    # Wait for all products except the next step's scores.
    dk, dv = warpgroup_mma_wait(num_outstanding=1, deps=(dk, dv))
    named_barrier("arrive", OF_ROWS + slot, 288)
    return KeySums(dk=dk, dv=dv, last_bh=last_bh, last_rows=last_rows), raw


@gluon.jit
def consume_steps(
    sums, it, start, stop, rotation, full, head, call, ME: gl.constexpr, MASKED: gl.constexpr,
    ROTATED: gl.constexpr,
):
    """Take the steps from start to stop, at least one. Return `KeySums` and the number of steps so
    far."""
    memory = call.memory
    BLOCK_M: gl.constexpr = memory.BLOCK_M
    raw = begin_scores(it, True, memory, call.keys, ME)
    for i in range(start, stop):
        m0 = row_of_step(i, rotation, stop, BLOCK_M, ROTATED)
        sums, raw = add_step(sums, raw, i + 1 < stop, it, m0, full, head, call, ME, MASKED)
        it += 1
    # Wait for the undefined product that the last step issued.
    warpgroup_mma_wait(num_outstanding=0, deps=(raw,))
    return sums, it


@gluon.jit
def consume_pass(
    sums, it, run, last_run, steps, whole, rotation, b, h, n0, call, ME: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Take one head's MASKED steps, or the others: of the two loops only the first has mask code.
    Return `KeySums` and the number of steps so far."""
    mask = call.mask
    head = StepHead(b=b, h=h, bh=b * call.grid.heads + h, n0=n0)
    HAS_MASK_MOD: gl.constexpr = call.mods.MASK_MOD is not None
    STEPS_A_BLOCK: gl.constexpr = mask.Q_BLOCK // call.memory.BLOCK_M if mask.HAS_MASK else 1
    for r in range(run, last_run):
        # The bounds aren't loaded one run ahead, although that would hide the latency: Triton 3.6
        # (triton-loop-aware-cse) replaces values carried from run to run by the first run's, and
        # so takes every run for the first. The producer has just brought these bounds into L1.
        start, stop, full = steps_of_run(
            mask, r, steps, whole, STEPS_A_BLOCK, HAS_MASK_MOD, MASKED,
        )
        if start < stop:
            sums, it = consume_steps(
                sums, it, start, stop, rotation, full, head, call, ME, MASKED,
                not MASKED and not mask.HAS_MASK,
            )
    return sums, it


@gluon.jit
def is_finite(x):
    """Return whether all elements of x [64, columns] are finite."""
    # The reduction takes one instruction per element; comparing each would take three.
    return gl.reduce(gl.reduce(gl.abs(x), 1, larger), 0, larger) < float("inf")


@gluon.jit
def store_sums(pointer, x, COLUMNS: gl.constexpr):
    """Store x [64, columns] to rows of COLUMNS float32 elements. Each four threads fill a sector
    of 32 bytes."""
    LAYOUT: gl.constexpr = layout_of_products(x.shape[1])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    gl.store(pointer + gl.expand_dims(rows * COLUMNS, 1) + gl.expand_dims(columns, 0), x)


@gluon.jit
def consume(call, ME: gl.constexpr):
    """Compute dK and dV of the keys 64 * ME to 64 * ME + 63 of each tile.

    Args:
        call: `BackwardCall`.
    """
    memory = call.memory
    keys = call.keys
    mask = call.mask
    grid = call.grid
    scale = call.mods.scale
    ds_tiles = call.dq.ds_tiles
    dq_tiles = call.dq.dq_tiles
    BLOCK_M: gl.constexpr = memory.BLOCK_M
    D: gl.constexpr = memory.D
    DV: gl.constexpr = memory.DV
    RAGGED: gl.constexpr = grid.RAGGED
    WANT_DQ: gl.constexpr = call.dq.WANT_DQ
    HAS_MASK_MOD: gl.constexpr = call.mods.MASK_MOD is not None
    ALONE: gl.constexpr = BLOCK_M == 64 and D == 64
    SPLIT: gl.constexpr = grid.head_splits is not None
    KEY_LAYOUT: gl.constexpr = call.dk_desc.layout
    dtype: gl.constexpr = memory.q_tiles.dtype
    k = keys.k_tiles.index(ME).reshape([64, D])
    v = keys.v_tiles.index(ME).reshape([64, DV])
    it = gl.to_tensor(0)
    count = gl.to_tensor(0)
    total = grid.tiles * grid.units
    mbarrier.wait(keys.full, 0)
    index = said(keys.words, 0)
    while index < total:
        tile, unit = tile_of(index, grid)
        kv_b, kv_head = kv_head_of(unit, grid)
        steps, whole = whole_steps(tile, grid, call.mods.SCORE_MOD is not None, BLOCK_M)
        n0 = tile * 128 + ME * 64
        sums = KeySums(
            dk=gl.full([64, D], 0.0, gl.float32, layout=layout_of_products(D)),
            dv=gl.full([64, DV], 0.0, gl.float32, layout=layout_of_products(DV)),
            last_bh=gl.to_tensor(0), last_rows=gl.to_tensor(-1),
        )
        first, end = streams_of(unit, grid)
        for stream in range(first, end):
            b, h = head_of_stream(stream, kv_b, kv_head, grid)
            run, last_run = runs_of(mask, b, h, tile, mask.KV_BLOCK // 128)
            if HAS_MASK_MOD or RAGGED:
                sums, it = consume_pass(
                    sums, it, run, last_run, steps, whole, 0, b, h, n0, call, ME, True,
                )
            rotation = tile * whole // grid.tiles
            sums, it = consume_pass(
                sums, it, run, last_run, steps, whole, rotation, b, h, n0, call, ME, False,
            )
        dk = sums.dk
        dv = sums.dv
        last_bh = sums.last_bh
        last_rows = sums.last_rows
        if WANT_DQ and not ALONE:
            # The last step's dQ is made while TMA stores dV; it is undefined if there was no step.
            wait_for_ds(it - 1, last_rows >= 0, ME)
            dq = begin_dq(it + (DS_STAGES - 1), ds_tiles, keys.k_tiles, ME, D)
        if SPLIT:
            # `sum_kernel` sets it to 1 where a sum is non-finite.
            kv_unit = unit // grid.head_splits
            gl.store(call.odd_keys + (kv_unit * grid.tiles + tile) * 2 + ME, 0)
            at = gl.cast(unit * grid.tiles * 128 + n0, gl.int64) * (D + DV)
            store_sums(call.key_sums + at, dk, D + DV)
            store_sums(call.key_sums + at + D, dv, D + DV)
        else:
            # If not fine, `repair_kernel` computes these keys again.
            fine = is_finite(dk) & is_finite(dv)
            gl.store(call.odd_keys + (unit * grid.tiles + tile) * 2 + ME, gl.where(fine, 0, 1))
            # dV is stored from the buffer of this consumer's values, dK from the one that dQ no
            # longer needs, so that the next tile's keys can be loaded meanwhile.
            v.store(dv.to(dtype))
            fence_async_shared()
            store_box(call.dv_desc, [kv_b, kv_head, n0, 0], keys.v_tiles.index(ME))
        if WANT_DQ:
            if not ALONE:
                dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
            # TMA has stored dV, and all of this consumer's warps have the dQ that reads both
            # halves of the keys: the next tile may be loaded.
            tma.store_wait(0)
            mbarrier.arrive(keys.empty, count=1)
            if not ALONE:
                place_dq(dq, ME, dq_tiles)
                fence_async_shared()
                if last_rows >= 0:
                    _add(call.dq.desc, [last_bh, last_rows, 0], dq_tiles.index(ME))
                tma.store_wait(0)
            if not SPLIT:
                dk_tile = reinterpret(dq_tiles.index(ME), dtype, [1, 1, 64, D], KEY_LAYOUT)
                dk_tile.reshape([64, D]).store((dk * scale).to(dtype))
                fence_async_shared()
                store_box(call.dk_desc, [kv_b, kv_head, n0, 0], dk_tile)
        else:
            if not SPLIT:
                k.store((dk * scale).to(dtype))
                fence_async_shared()
                store_box(call.dk_desc, [kv_b, kv_head, n0, 0], keys.k_tiles.index(ME))
            tma.store_wait(0)
            mbarrier.arrive(keys.empty, count=1)
        count += 1
        mbarrier.wait(keys.full, count & 1)
        index = said(keys.words, 0)
    tma.store_wait(0)


@gluon.jit
def backward_kernel(
    query, dout, key, value, row_values, dk, dv, key_sums, dq_sums, odd_keys, counter, offsets,
    ends, runs, mask_strides, tables, ints, floats, totals, shifts, scale, batch, heads, kv_heads,
    units, q_length, kv_length, tiles, head_group, head_splits, split_heads,
    SCORE_MOD: gl.constexpr, READ_STEP: gl.constexpr,
    SCORE_MOD_BACKWARD: gl.constexpr, CAPTURED_GRADIENTS: gl.constexpr, MASK_MOD: gl.constexpr,
    HAS_MASK: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, GROUP: gl.constexpr,
    KV_SHARED: gl.constexpr, RAGGED: gl.constexpr, WANT_DQ: gl.constexpr, BLOCK_M: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, DYNAMIC: gl.constexpr,
):
    """Backward kernel: dK and dV, and sums of dQ and of captured tensors' gradients.

    Args:
        query, dout: descriptors [B, Hq, L, E or Ev] of boxes of BLOCK_M rows, D or DV columns.
        key, value, dk, dv: descriptors [Bkv, Hkv, S, E or Ev] of boxes of 64 keys.
        row_values: descriptor [4 * B * Hq, padded L] of boxes [1, BLOCK_M], written by
            `backward_rows.prepare_kernel`.
        dq_sums: descriptor of boxes [1, 128, 32], which the kernel adds to: each holds 64 rows and
            64 columns in the order of `in_order_of_threads`.
        key_sums: float32 [units, tiles * 128, D + DV], written with each split's dK before its
            factor `scale`, and dV, which `anyflex_triton.backward_keys.sum_kernel` adds up. None
            where KV heads aren't split; else dk and dv aren't written.
        odd_keys: [Bkv * Hkv, tiles * 2], written; with 0 where KV heads are split.
        offsets, ends, runs: of the transposed mask, as in `anyflex_triton.backward_keys`. Q_BLOCK
            is a multiple of BLOCK_M, KV_BLOCK of 128.
        units: Bkv * Hkv, times head_splits. head_group: how many of them run at a time.
        head_splits, split_heads: None where KV heads aren't split.
        RAGGED: whether kv_length isn't a multiple of 128, or there is a score mod and q_length
            isn't a multiple of BLOCK_M.
    """
    gl.static_assert(OF_ROWS + STAGES <= OF_DS, "each slot of query rows has a barrier")
    dtype: gl.constexpr = query.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, D], query.layout)
    do_tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, DV], dout.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], key.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, DV], value.layout)
    lse_rows = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], row_values.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], row_values.layout)
    if WANT_DQ:
        ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], dtype)
        # A consumer that adds its own keys' part of dQ needs one slot.
        PLACES: gl.constexpr = 2 if BLOCK_M == 64 and D == 64 else DS_STAGES * 2
        ds_tiles = gl.allocate_shared_memory(dtype, [PLACES, 64, BLOCK_M], ds_layout)
        dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 1, 128, 32], dq_sums.layout)
    else:
        ds_tiles = lse_rows
        dq_tiles = lse_rows
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    # Mailbox word with the tile's number.
    tile_words = gl.allocate_shared_memory(gl.int32, [1, 1], word)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for slot in gl.static_range(STAGES):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(do_full.index(slot), count=1)
    fence_async_shared()
    memory = StepMemory(
        q_tiles=q_tiles, do_tiles=do_tiles, lse_rows=lse_rows, delta_rows=delta_rows,
        q_full=q_full, do_full=do_full, BLOCK_M=BLOCK_M, D=D, DV=DV,
    )
    keys = KeyMemory(
        k_tiles=k_tiles, v_tiles=v_tiles, words=tile_words, full=kv_full, empty=kv_empty,
    )
    mask = MaskRuns(
        offsets=offsets, ends=ends, runs=runs, strides=mask_strides, HAS_MASK=HAS_MASK,
        Q_BLOCK=Q_BLOCK, KV_BLOCK=KV_BLOCK,
    )
    grid = KeyGrid(
        batch=batch, heads=heads, kv_heads=kv_heads, units=units, q_length=q_length,
        kv_length=kv_length, tiles=tiles, head_group=head_group, head_splits=head_splits,
        split_heads=split_heads, GROUP=GROUP, KV_SHARED=KV_SHARED, RAGGED=RAGGED,
    )
    call = BackwardCall(
        dk_desc=dk, dv_desc=dv, key_sums=key_sums,
        dq=DqMemory(ds_tiles=ds_tiles, dq_tiles=dq_tiles, desc=dq_sums, WANT_DQ=WANT_DQ),
        odd_keys=odd_keys, memory=memory, keys=keys, mask=mask, grid=grid, tables=tables,
        mods=Mods(
            ints=ints, floats=floats, shifts=shifts, scale=scale, READ=READ_STEP,
            SCORE_MOD=SCORE_MOD, MASK_MOD=MASK_MOD,
        ),
        gradients=ModGradients(
            totals=totals, SCORE_MOD_BACKWARD=SCORE_MOD_BACKWARD,
            CAPTURED_GRADIENTS=CAPTURED_GRADIENTS,
        ),
    )
    gl.warp_specialize([
        (consume, (call, 0)),
        (consume, (call, 1)),
        (produce, (
            StepLoads(query=query, dout=dout, row_values=row_values), key, value, counter,
            memory, keys, mask, grid, SCORE_MOD is not None, MASK_MOD is not None, DYNAMIC,
        )),
    ], [4, 1], [240, 24])
