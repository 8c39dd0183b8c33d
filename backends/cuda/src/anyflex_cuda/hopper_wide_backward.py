"""Backward on Hopper above head dim 128: a kernel that makes dK and dV, or dQ.

The registers of a warpgroup hold one gradient of 64 rows beside a step's scores. So a program that
makes dK and dV of 64 keys has a consumer of four warps for each. The consumer of dV makes the
weights and hands them, times the score mod's derivative, to the consumer of dK, which multiplies
dout with the values meanwhile. A program that makes dQ of 128 query rows has two independent
consumers of 64 rows each. A producer of one warp loads by TMA. In both a step's scores are own
rows (keys, or query rows) by columns (query rows, or keys), so that the weights are a register
operand of the product that adds to the gradient.

Scores and dout's products are computed twice: 7 products where `hopper_backward` has 5. But
nothing is added up in memory, and all sums are bitwise reproducible.

`backward_rows.prepare_kernel` runs before them, `repair_kernel` after them.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anyflex_cuda.apply_mods import weights_of
from anyflex_cuda.hopper_backward import (
    KeyGrid,
    head_of_stream,
    is_finite,
    kv_head_of,
    now,
    runs_of,
    steps_of_run,
    store_sums,
    streams_of,
    tile_of,
)
from anyflex_cuda.kernel_records import MaskRuns
from anyflex_cuda.smem_mailbox import named_barrier, said, say
from anyflex_cuda.split_tiles import (
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
from anyflex_triton.device_functions import ModGradients, ModInputs, Mods, record

__all__ = ["wide_kernel"]


@record
class WideMemory:
    """Shared memory that products read: own rows (of keys and values, or of queries and dout), and
    a ring of the steps' tensors.

    Attributes:
        own, own_later: tiles of own rows, multiplied with the first and the second tensor.
        first, second: tiles of a step's first tensor, which makes the scores, and of its second.
        rows: lse2 and delta of a step's query rows, or None.
        first_full, second_full: barriers of slots that are loaded.
        factors: buffer in which the consumer of dV hands factors to that of dK, or None.
    """

    own: Any
    own_later: Any
    first: Any
    second: Any
    rows: Any
    first_full: Any
    second_full: Any
    factors: Any


@record
class WideLoads:
    """Descriptors of own rows' two tensors, of a step's two, and of row values or None.

    Attributes:
        D, DV: columns of the first and of the second tensors.
    """

    own: Any
    own_later: Any
    first: Any
    second: Any
    row_values: Any
    D: Any
    DV: Any


@record
class WideCall:
    """Arguments of a consumer except its outputs.

    Attributes:
        memory, mask, grid: `WideMemory`, `MaskRuns`, `KeyGrid`.
        mods, gradients: `Mods` and `ModGradients` of `anyflex_triton.kernel_records`.
        row_values, padded_length: arguments of `wide_kernel` for dQ; None for dK and dV.
        odd: argument odd_keys or odd_rows of `wide_kernel`. key_sums: argument for dK and dV.
        words: mailbox word by which the consumer of dK says whether dK is finite.
        OWN_BLOCK, STEP_BLOCK: the mask's block sizes along own rows and along steps.
    """

    odd: Any
    key_sums: Any
    words: Any
    own_full: Any
    memory: Any
    mask: Any
    grid: Any
    row_values: Any
    padded_length: Any
    tables: Any
    mods: Any
    gradients: Any
    OWN_BLOCK: Any
    STEP_BLOCK: Any
    D: Any
    DV: Any


@record
class OwnRows:
    """64 own rows of a consumer.

    Attributes:
        first: number of the first row. lse2, delta: [64, 1] of query rows; None for keys.
    """

    first: Any
    lse2: Any
    delta: Any


# Argument lists would be a line an argument.
# fmt: off

STEP = gl.constexpr(64)
"""Columns of a step, which are query rows for dK and dV, keys for dQ."""
STAGES = gl.constexpr(2)
"""Pipeline stages: steps whose first tensor, which makes the scores, is in shared memory. For dK
and dV the second tensor, dout, has as many; for dQ there is room for one step's values."""

# Numbers of named barriers, two of each kind, one per slot: a step's first tensor is read, its
# second tensor is read, dV's consumer has placed factors, dK's consumer has taken them. At the end
# of a tile dK's consumer reports by the first of PLACED whether dK is finite.
OF_FIRST = gl.constexpr(8)
OF_SECOND = gl.constexpr(10)
PLACED = gl.constexpr(12)
TAKEN = gl.constexpr(14)


# Shared by producer and consumers: runs, steps


@gluon.jit
def whole_steps(tile, grid, HAS_SCORE_MOD: gl.constexpr, OF_QUERIES: gl.constexpr):
    """Return (number of a head's steps, number of those at its begin that have no row or key past
    the end that could matter)."""
    steps = gl.cdiv(grid.kv_length if OF_QUERIES else grid.q_length, STEP)
    if not grid.RAGGED:
        return steps, steps
    elif OF_QUERIES:
        return steps, grid.kv_length // STEP
    else:
        # Rows past the end have lse +inf and thus weight 0, unless a score mod makes their scores
        # non-finite.
        whole = grid.q_length // STEP if HAS_SCORE_MOD else steps
        return steps, gl.where((tile + 1) * 64 > grid.kv_length, 0, whole)


# Producer


@gluon.jit
def load_slot(
    it, first, b, h, OF_SLOT: gl.constexpr, descs, tiles, full, SLOTS: gl.constexpr,
    BYTES: gl.constexpr,
):
    """Load a step's first tensor, or its second, when both consumers have released its slot."""
    slot = it % SLOTS
    if it >= SLOTS:
        named_barrier("sync", OF_SLOT + slot, 288, 1)
    mbarrier.expect(full.index(slot), BYTES)
    load_parts(descs, tiles, slot, full.index(slot), b, h, first)


@gluon.jit
def load_step(it, first, b, h, at_rows, loads, memory):
    SECOND_SLOTS: gl.constexpr = memory.second_full.shape[0]
    load_slot(
        it, first, b, h, OF_FIRST, loads.first, memory.first, memory.first_full, STAGES,
        STEP * loads.D * 2,
    )
    OF_ROWS: gl.constexpr = 0 if memory.rows is None else STEP * 8
    load_slot(
        it, first, b, h, OF_SECOND, loads.second, memory.second, memory.second_full, SECOND_SLOTS,
        STEP * loads.DV * 2 + OF_ROWS,
    )
    if memory.rows is not None:
        slot = it % SECOND_SLOTS
        for i in gl.static_range(2):
            # Load lse2 and delta.
            load_box(
                loads.row_values, [at_rows[i], first], memory.second_full.index(slot),
                memory.rows[i].index(slot),
            )


@gluon.jit
def load_pass(
    it, run, last_run, steps, whole, b, h, at_rows, loads, memory, mask, MASKED: gl.constexpr,
    HAS_MASK_MOD: gl.constexpr, STEPS_A_BLOCK: gl.constexpr,
):
    """Load the steps that `consume_pass` takes."""
    for r in range(run, last_run):
        start, stop, _ = steps_of_run(mask, r, steps, whole, STEPS_A_BLOCK, HAS_MASK_MOD, MASKED)
        for i in range(start, stop):
            load_step(it, i * STEP, b, h, at_rows, loads, memory)
            it += 1
    return it


@gluon.jit
def produce(
    loads, memory, own_full, mask, grid, HAS_SCORE_MOD: gl.constexpr, HAS_MASK_MOD: gl.constexpr,
    OWN_BLOCK: gl.constexpr, STEP_BLOCK: gl.constexpr, OF_QUERIES: gl.constexpr,
):
    """Load a tile's own rows, then the tensors of their steps."""
    ROWS: gl.constexpr = 128 if OF_QUERIES else 64
    TILES_A_BLOCK: gl.constexpr = OWN_BLOCK // ROWS
    STEPS_A_BLOCK: gl.constexpr = STEP_BLOCK // STEP if mask.HAS_MASK else 1
    tile, unit, own_b, own_h = tile_of_this(grid, OF_QUERIES)
    first_stream, end_stream = streams_of_this(unit, grid, OF_QUERIES)
    steps, whole = whole_steps(tile, grid, HAS_SCORE_MOD, OF_QUERIES)
    mbarrier.expect(own_full, ROWS * (loads.D + loads.DV) * 2)
    for half in gl.static_range(ROWS // 64):
        first = tile * ROWS + half * 64
        load_parts(loads.own, memory.own, half, own_full, own_b, own_h, first)
        load_parts(loads.own_later, memory.own_later, half, own_full, own_b, own_h, first)
    it = gl.to_tensor(0)
    for stream in range(first_stream, end_stream):
        b, h = head_of(stream, own_b, own_h, grid, OF_QUERIES)
        if OF_QUERIES:
            step_b = 0 * b if grid.KV_SHARED else b
            step_h = h // grid.GROUP
        else:
            step_b, step_h = b, h
        bh = b * grid.heads + h
        at_rows = (bh, 3 * grid.batch * grid.heads + bh)
        run, last_run = runs_of(mask, b, h, tile, TILES_A_BLOCK)
        if HAS_MASK_MOD or grid.RAGGED:
            it = load_pass(
                it, run, last_run, steps, whole, step_b, step_h, at_rows, loads, memory, mask,
                True, HAS_MASK_MOD, STEPS_A_BLOCK,
            )
        it = load_pass(
            it, run, last_run, steps, whole, step_b, step_h, at_rows, loads, memory, mask, False,
            HAS_MASK_MOD, STEPS_A_BLOCK,
        )
    # Wait for the last slots, so that no barrier is left mid-phase.
    SECOND_SLOTS: gl.constexpr = memory.second_full.shape[0]
    for last in range(gl.maximum(it - STAGES, 0), it):
        named_barrier("sync", OF_FIRST + last % STAGES, 288, 1)
    for last in range(gl.maximum(it - SECOND_SLOTS, 0), it):
        named_barrier("sync", OF_SECOND + last % SECOND_SLOTS, 288, 1)


@gluon.jit
def tile_of_this(grid, OF_QUERIES: gl.constexpr):
    """Return (tile, unit, batch entry, head) of this program; the longest tiles under causal masks
    come first."""
    tile, unit = tile_of(gl.program_id(0), grid)
    if OF_QUERIES:
        return grid.tiles - 1 - tile, unit, unit // grid.heads, unit % grid.heads
    else:
        kv_b, kv_head = kv_head_of(unit, grid)
        return tile, unit, kv_b, kv_head


@gluon.jit
def streams_of_this(unit, grid, OF_QUERIES: gl.constexpr):
    """Return (first, end) of the query heads that a tile sees."""
    if OF_QUERIES:
        return 0, 1
    else:
        return streams_of(unit, grid)


@gluon.jit
def head_of(stream, own_b, own_h, grid, OF_QUERIES: gl.constexpr):
    """Return (batch entry, query head) of one of the query heads that a tile sees."""
    if OF_QUERIES:
        return own_b, own_h
    else:
        return head_of_stream(stream, own_b, own_h, grid)


# Consumers


@gluon.jit
def begin_products(
    it, there, own_tiles, tiles, full, HALF: gl.constexpr,
):
    """Return products of 64 own rows with a step's tensor, in flight. Unless the step is `there`,
    this doesn't wait for the tensor, and the products are undefined."""
    slot = it % full.shape[0]
    mbarrier.wait(full.index(slot), (it // full.shape[0]) & 1, pred=there)
    half = now(gl.to_tensor(HALF))
    later = gl.full([64, STEP], 0.0, gl.float32, layout=layout_of_products(STEP))
    for p in gl.static_range(len(tiles)):
        own = own_tiles[p].index(half).reshape([64, own_tiles[p].shape[4]])
        step = tiles[p].index(slot).reshape([STEP, tiles[p].shape[4]])
        later = warpgroup_mma(own, step.permute((1, 0)), later, use_acc=p > 0, is_async=True)
    return later


@gluon.jit
def weights_of_step(
    raw, lse2, first, own_rows, full, b, h, call, MASKED: gl.constexpr, OF_QUERIES: gl.constexpr,
):
    """Return (weights, weights times the score mod's derivative), each [64, STEP]."""
    S_LAYOUT: gl.constexpr = layout_of_products(STEP)
    mods = call.mods
    grid = call.grid
    columns = gl.expand_dims(gl.arange(0, STEP, layout=gl.SliceLayout(0, S_LAYOUT)), 0)
    own = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT)), 1)
    if OF_QUERIES:
        rows, keys = own + own_rows.first, columns + first
    else:
        rows, keys = columns + first, own + own_rows.first
    if MASKED and grid.RAGGED:
        q_idx = gl.minimum(rows, grid.q_length - 1) + mods.shifts[2]
        kv_idx = gl.minimum(keys, grid.kv_length - 1) + mods.shifts[3]
    # `now` makes one sum for all columns; compilers would add its terms to each column.
    elif OF_QUERIES:
        q_idx, kv_idx = rows + mods.shifts[2], columns + now(first + mods.shifts[3])
    else:
        q_idx, kv_idx = columns + now(first + mods.shifts[2]), keys + mods.shifts[3]
    weights, factor, _ = weights_of(
        raw, lse2, rows, keys, full,
        ModInputs(
            b=b + mods.shifts[0], h=h + mods.shifts[1], q_idx=q_idx, kv_idx=kv_idx,
            tables=call.tables,
        ),
        grid.q_length, grid.kv_length, mods, call.gradients, MASKED, grid.RAGGED,
    )
    return weights, factor


@gluon.jit
def operand_of(x, acc, dtype: gl.constexpr):
    """Return x, rounded, as an operand of the products that are added to acc."""
    LAYOUT: gl.constexpr = layout_of_products(acc[0].shape[1])
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.jit
def add_to_dv(
    dv, raw, more, it, first, own_rows, full, b, h, call, MASKED: gl.constexpr,
):
    """Take one step. Return (dV, the next step's raw products, in flight).

    Args:
        raw: this step's products, the only ones in flight.
    """
    memory = call.memory
    slot = it % STAGES
    raw = warpgroup_mma_wait(num_outstanding=0, deps=(raw,))
    named_barrier("arrive", OF_FIRST + slot, 288)
    mbarrier.wait(memory.second_full.index(slot), (it // STAGES) & 1)
    lse2 = memory.rows[0].index(slot).load(layout_of_products(STEP))
    weights, factor = weights_of_step(
        raw, lse2, first, own_rows, full, b, h, call, MASKED, False,
    )
    if it >= STAGES:
        named_barrier("sync", TAKEN + slot, 256)
    memory.factors.index(slot).store(factor)
    named_barrier("arrive", PLACED + slot, 256)
    weights = operand_of(weights, dv, memory.first[0].dtype)
    later = products_of_values(weights, memory.second, slot, dv)
    raw = begin_products(it + 1, more, memory.own, memory.first, memory.first_full, 0)
    dv = awaited(later, len(memory.first))
    named_barrier("arrive", OF_SECOND + slot, 288)
    return dv, raw


@gluon.jit
def add_to_dk(dk, raw, more, it, memory):
    """Take one step. Return (dK, the next step's products of dout, in flight).

    Args:
        raw: this step's products, the only ones in flight.
    """
    S_LAYOUT: gl.constexpr = layout_of_products(STEP)
    slot = it % STAGES
    raw = warpgroup_mma_wait(num_outstanding=0, deps=(raw,))
    dweights = raw - memory.rows[1].index(slot).load(S_LAYOUT)
    named_barrier("arrive", OF_SECOND + slot, 288)
    # The other consumer has this step's scores by then, so the query rows are loaded.
    named_barrier("sync", PLACED + slot, 256)
    ds = memory.factors.index(slot).load(S_LAYOUT) * dweights
    named_barrier("arrive", TAKEN + slot, 256)
    ds = operand_of(ds, dk, memory.first[0].dtype)
    later = products_of_values(ds, memory.first, slot, dk)
    raw = begin_products(it + 1, more, memory.own_later, memory.second, memory.second_full, 0)
    dk = awaited(later, len(memory.second))
    named_barrier("arrive", OF_FIRST + slot, 288)
    return dk, raw


@gluon.jit
def add_to_dq(
    dq, raw, more, it, first, own_rows, full, b, h, call, ME: gl.constexpr, MASKED: gl.constexpr,
):
    """Take one step. Return (dQ, the next step's raw products, in flight).

    Args:
        raw: this step's products, the only ones in flight.
    """
    memory = call.memory
    slot = it % STAGES
    # This wait stands before the next products are issued. Unless it leaves none in flight, ptxas
    # treats the products carried around the loop as unfinished, and serializes all products
    # (C7514).
    raw = warpgroup_mma_wait(num_outstanding=0, deps=(raw,))
    dweights = begin_products(
        it, True, memory.own_later, memory.second, memory.second_full, ME,
    )
    _, factor = weights_of_step(
        raw, own_rows.lse2, first, own_rows, full, b, h, call, MASKED, True,
    )
    dweights = warpgroup_mma_wait(num_outstanding=0, deps=(dweights,))
    # The second tensor has one slot, which is released here.
    named_barrier("arrive", OF_SECOND, 288)
    ds = operand_of(factor * (dweights - own_rows.delta), dq, memory.first[0].dtype)
    later = products_of_values(ds, memory.first, slot, dq)
    raw = begin_products(it + 1, more, memory.own, memory.first, memory.first_full, ME)
    # Wait for all products except the next step's scores.
    dq = awaited(later, len(memory.first))
    named_barrier("arrive", OF_FIRST + slot, 288)
    return dq, raw


@gluon.jit
def consume_steps(
    acc, it, start, stop, own_rows, full, b, h, call, ME: gl.constexpr, MASKED: gl.constexpr,
    GRADIENT: gl.constexpr,
):
    """Take the steps from start to stop, at least one. Return the gradient and the number of steps
    so far."""
    memory = call.memory
    if GRADIENT == "k":
        raw = begin_products(it, True, memory.own_later, memory.second, memory.second_full, 0)
    else:
        raw = begin_products(it, True, memory.own, memory.first, memory.first_full, ME)
    for i in range(start, stop):
        if GRADIENT == "v":
            acc, raw = add_to_dv(
                acc, raw, i + 1 < stop, it, i * STEP, own_rows, full, b, h, call, MASKED,
            )
        elif GRADIENT == "k":
            acc, raw = add_to_dk(acc, raw, i + 1 < stop, it, memory)
        else:
            acc, raw = add_to_dq(
                acc, raw, i + 1 < stop, it, i * STEP, own_rows, full, b, h, call, ME, MASKED,
            )
        it += 1
    # Wait for the undefined products that the last step issued.
    warpgroup_mma_wait(num_outstanding=0, deps=(raw,))
    return acc, it


@gluon.jit
def consume_pass(
    acc, it, run, last_run, steps, whole, own_rows, b, h, call, ME: gl.constexpr,
    MASKED: gl.constexpr, STEPS_A_BLOCK: gl.constexpr, GRADIENT: gl.constexpr,
):
    """Take one head's MASKED steps, or the others: of the two loops only the first has mask code.
    Return the gradient and the number of steps so far."""
    HAS_MASK_MOD: gl.constexpr = call.mods.MASK_MOD is not None
    for r in range(run, last_run):
        # The bounds aren't loaded one run ahead: see `hopper_backward.consume_pass`.
        start, stop, full = steps_of_run(
            call.mask, r, steps, whole, STEPS_A_BLOCK, HAS_MASK_MOD, MASKED,
        )
        if start < stop:
            acc, it = consume_steps(
                acc, it, start, stop, own_rows, full, b, h, call, ME, MASKED, GRADIENT,
            )
    return acc, it


@gluon.jit
def rows_of(row_values, unit, own_first, units, padded_length, S_LAYOUT: gl.constexpr):
    """Return (lse2 [64, 1], delta [64, 1], whether some row is far) of query rows, whose values
    are padded."""
    at = gl.cast(unit, gl.int64) * padded_length + own_first
    at = at + gl.arange(0, 64, layout=gl.SliceLayout(1, S_LAYOUT))
    lse2 = gl.load(row_values + at)
    delta = gl.load(row_values + gl.cast(units, gl.int64) * 3 * padded_length + at)
    far = gl.max(gl.where(lse2 != lse2, 1, 0), 0)
    return gl.expand_dims(lse2, 1), gl.expand_dims(delta, 1), far


@gluon.jit
def store_gradient(
    acc, tile, unit, own_b, own_h, own_first, far, call, out_descs, out_tiles, ME: gl.constexpr,
    GRADIENT: gl.constexpr,
):
    """Store a gradient of 64 rows, and whether `repair_kernel` has to compute them again.

    Args:
        far: whether some row of dQ is far.
        call: `WideCall`.
    """
    OF_QUERIES: gl.constexpr = GRADIENT == "q"
    if OF_QUERIES:
        # Non-finite values and mods may have made rows past the end arbitrary.
        acc = all_inside(acc, own_first, call.grid.q_length)
    # If not fine, `repair_kernel` computes these rows again.
    fine = is_finite(acc[0])
    if len(acc) > 1:
        fine = fine & is_finite(acc[1])
    if OF_QUERIES:
        # Far rows' gradients would be 0, not NaN, where the score mod has no derivative by the
        # score.
        fine = fine & (far == 0)
    found = gl.where(fine, 0, 1)
    if GRADIENT == "k":
        say(call.words, 0, found, 4)
        # The other consumer has seen the last steps taken and places no more factors.
        named_barrier("arrive", PLACED, 256)
    elif GRADIENT == "v":
        named_barrier("sync", PLACED, 256)
        gl.store(call.odd + unit * call.grid.tiles + tile, found | said(call.words, 0))
    else:
        gl.store(call.odd + (unit * call.grid.tiles + tile) * 2 + ME, found)
    # dK overwrites the keys, which the other consumer read for its last scores, before it placed
    # the last factors; after that it reads them for undefined products only. dV overwrites the
    # values, and the other consumer has just signalled that it is done with them.
    place_parts(
        acc if GRADIENT == "v" else scaled(acc, call.mods.scale), out_tiles, ME, False,
    )
    fence_async_shared()
    store_parts(out_descs, out_tiles, ME, own_b, own_h, own_first)
    tma.store_wait(0)


@gluon.jit
def consume(call, out_descs, out_tiles, ME: gl.constexpr, GRADIENT: gl.constexpr):
    """Compute a gradient of 64 rows; for dQ, of the half ME of the tile.

    Args:
        call: `WideCall`.
    """
    mask = call.mask
    grid = call.grid
    tiles = grid.tiles
    OF_QUERIES: gl.constexpr = GRADIENT == "q"
    ROWS: gl.constexpr = 128 if OF_QUERIES else 64
    TILES_A_BLOCK: gl.constexpr = call.OWN_BLOCK // ROWS
    STEPS_A_BLOCK: gl.constexpr = call.STEP_BLOCK // STEP if mask.HAS_MASK else 1
    S_LAYOUT: gl.constexpr = layout_of_products(STEP)
    HAS_MASK_MOD: gl.constexpr = call.mods.MASK_MOD is not None
    tile, unit, own_b, own_h = tile_of_this(grid, OF_QUERIES)
    first_stream, end_stream = streams_of_this(unit, grid, OF_QUERIES)
    own_first = tile * ROWS + ME * 64
    steps, whole = whole_steps(tile, grid, call.mods.SCORE_MOD is not None, OF_QUERIES)
    if OF_QUERIES:
        lse2, delta, far = rows_of(
            call.row_values, unit, own_first, grid.units, call.padded_length, S_LAYOUT,
        )
    else:
        lse2, delta, far = None, None, None
    own_rows = OwnRows(first=own_first, lse2=lse2, delta=delta)
    acc = zeros_of_parts(out_descs)
    it = gl.to_tensor(0)
    mbarrier.wait(call.own_full, 0)
    for stream in range(first_stream, end_stream):
        b, h = head_of(stream, own_b, own_h, grid, OF_QUERIES)
        run, last_run = runs_of(mask, b, h, tile, TILES_A_BLOCK)
        if HAS_MASK_MOD or grid.RAGGED:
            acc, it = consume_pass(
                acc, it, run, last_run, steps, whole, own_rows, b, h, call, ME, True,
                STEPS_A_BLOCK, GRADIENT,
            )
        acc, it = consume_pass(
            acc, it, run, last_run, steps, whole, own_rows, b, h, call, ME, False, STEPS_A_BLOCK,
            GRADIENT,
        )
    if GRADIENT == "v":
        # Wait for the last slots, so that no barrier is left mid-phase.
        for last in range(gl.maximum(it - STAGES, 0), it):
            named_barrier("sync", TAKEN + last % STAGES, 256)
    if call.key_sums is None:
        store_gradient(
            acc, tile, unit, own_b, own_h, own_first, far, call, out_descs, out_tiles, ME,
            GRADIENT,
        )
    else:
        # `sum_kernel` sets it to 1 where a sum is non-finite.
        gl.store(call.odd + unit // grid.head_splits * tiles + tile, 0)
        COLUMNS: gl.constexpr = call.D + call.DV
        at = gl.cast(unit * tiles * 64 + own_first, gl.int64) * COLUMNS
        at += call.D if GRADIENT == "v" else 0
        for p in gl.static_range(len(acc)):
            store_sums(call.key_sums + at + p * acc[0].shape[1], acc[p], COLUMNS)


@gluon.jit
def zeros_of_parts(descs):
    """Return zero accumulators, one for each part."""
    found = descs[:0]
    for p in gl.static_range(len(descs)):
        found = found + (zeros_of(descs[p].block_shape[3]),)
    return found


@gluon.jit
def inside(acc, first, end):
    """Return a part with 0 in rows past the end."""
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, layout_of_products(acc.shape[1]))
    rows = first + gl.arange(0, 64, layout=OF_ROWS)
    return gl.where(gl.expand_dims(rows < end, 1), acc, 0.0)


@gluon.jit
def all_inside(acc, first, end):
    """Apply `inside` to each part."""
    found = acc[:0]
    for p in gl.static_range(len(acc)):
        found = found + (inside(acc[p], first, end),)
    return found


@gluon.jit
def scaled(acc, scale):
    """Return each part times scale."""
    found = acc[:0]
    for p in gl.static_range(len(acc)):
        found = found + (acc[p] * scale,)
    return found


@gluon.jit
def barriers(COUNT: gl.constexpr):
    """Return COUNT mbarriers, each for one arrival."""
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=1)
    return found


@gluon.jit
def wide_kernel(
    query, query_2, key, key_2, value, value_2, dout, dout_2, dq, dq_2, dk, dk_2, dv, dv_2,
    row_values, key_sums, odd_keys, odd_rows, offsets, ends, runs, mask_strides, tables, ints,
    floats, shifts, scale, batch, heads, kv_heads, units, q_length, kv_length, padded_length,
    tiles, head_group, head_splits, split_heads, OF_QUERIES: gl.constexpr,
    SCORE_MOD: gl.constexpr, SCORE_MOD_BACKWARD: gl.constexpr, MASK_MOD: gl.constexpr,
    HAS_MASK: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, GROUP: gl.constexpr,
    KV_SHARED: gl.constexpr, RAGGED: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
):
    """Kernel of dQ, 128 query rows per program (OF_QUERIES), or of dK and dV, 64 keys per program.
    Arguments that belong to the other gradients are None.

    Args:
        query, key, value, dout, dq, dk, dv: descriptors [B, H, length, E or Ev] of boxes of 64
            rows and the columns of the first of `forward_call.parts_of`.
        row_values: written by `backward_rows.prepare_kernel`: float32 [4, B, Hq, padded_length];
            for dK and dV a descriptor of it, [4 * B * Hq, padded_length], of boxes [1, 64].
        key_sums: as in `hopper_backward.backward_kernel`, [units, tiles * 64, D + DV]; None for dQ
            and where KV heads aren't split.
        odd_keys: as odd_keys there, [Bkv * Hkv, tiles]. odd_rows: [B * Hq, tiles * 2], written.
        offsets, ends, runs: rows of the mask; for dK and dV of the transposed mask. Q_BLOCK is a
            multiple of 128, or for dK and dV of 64, and KV_BLOCK of 64.
        units: B * Hq, or Bkv * Hkv times head_splits. head_group: how many of them run at a time.
        RAGGED: whether kv_length isn't a multiple of 64, or for dK and dV there is a score mod and
            q_length isn't a multiple of 64.
    """
    q_descs = descriptors(query, query_2)
    k_descs = descriptors(key, key_2)
    v_descs = descriptors(value, value_2)
    do_descs = descriptors(dout, dout_2)
    if OF_QUERIES:
        loads = WideLoads(
            own=q_descs, own_later=do_descs, first=k_descs, second=v_descs, row_values=None, D=D,
            DV=DV,
        )
    else:
        loads = WideLoads(
            own=k_descs, own_later=v_descs, first=q_descs, second=do_descs, row_values=row_values,
            D=D, DV=DV,
        )
    OWN_TILES: gl.constexpr = 2 if OF_QUERIES else 1
    SECOND_SLOTS: gl.constexpr = 1 if OF_QUERIES else STAGES
    own_tiles = buffers(loads.own, OWN_TILES)
    own_later_tiles = buffers(loads.own_later, OWN_TILES)
    first_tiles = buffers(loads.first, STAGES)
    second_tiles = buffers(loads.second, SECOND_SLOTS)
    if OF_QUERIES:
        step_rows = None
        factors = None
        words = None
    else:
        lse_rows = gl.allocate_shared_memory(gl.float32, [STAGES, 1, STEP], row_values.layout)
        delta_rows = gl.allocate_shared_memory(gl.float32, [STAGES, 1, STEP], row_values.layout)
        step_rows = (lse_rows, delta_rows)
        # A thread stores two neighbours at a time; the eight rows of a warp lie in different
        # banks.
        OF_FACTORS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
        factors = gl.allocate_shared_memory(gl.float32, [STAGES, 64, STEP], OF_FACTORS)
        word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        # Mailbox word that says whether dK is finite.
        words = gl.allocate_shared_memory(gl.int32, [1, 1], word)
    own_full = barriers(1)
    memory = WideMemory(
        own=own_tiles, own_later=own_later_tiles, first=first_tiles, second=second_tiles,
        rows=step_rows, first_full=barriers(STAGES), second_full=barriers(SECOND_SLOTS),
        factors=factors,
    )
    fence_async_shared()
    mask = MaskRuns(
        offsets=offsets, ends=ends, runs=runs, strides=mask_strides, HAS_MASK=HAS_MASK,
        Q_BLOCK=Q_BLOCK, KV_BLOCK=KV_BLOCK,
    )
    grid = KeyGrid(
        batch=batch, heads=heads, kv_heads=kv_heads, units=units, q_length=q_length,
        kv_length=kv_length, tiles=tiles, head_group=head_group, head_splits=head_splits,
        split_heads=split_heads, GROUP=GROUP, KV_SHARED=KV_SHARED, RAGGED=RAGGED,
    )
    OWN_BLOCK: gl.constexpr = Q_BLOCK if OF_QUERIES else KV_BLOCK
    STEP_BLOCK: gl.constexpr = KV_BLOCK if OF_QUERIES else Q_BLOCK
    call = WideCall(
        odd=odd_rows if OF_QUERIES else odd_keys, key_sums=key_sums, words=words,
        own_full=own_full.index(0), memory=memory, mask=mask, grid=grid,
        row_values=row_values if OF_QUERIES else None, padded_length=padded_length, tables=tables,
        mods=Mods(
            ints=ints, floats=floats, shifts=shifts, scale=scale, READ=None, SCORE_MOD=SCORE_MOD,
            MASK_MOD=MASK_MOD,
        ),
        gradients=ModGradients(
            totals=None, SCORE_MOD_BACKWARD=SCORE_MOD_BACKWARD, CAPTURED_GRADIENTS=None,
        ),
        OWN_BLOCK=OWN_BLOCK, STEP_BLOCK=STEP_BLOCK, D=D, DV=DV,
    )
    if OF_QUERIES:
        dq_descs = descriptors(dq, dq_2)
        gl.warp_specialize([
            (consume, (call, dq_descs, own_tiles, 0, "q")),
            (consume, (call, dq_descs, own_tiles, 1, "q")),
            (produce, (
                loads, memory, own_full.index(0), mask, grid, SCORE_MOD is not None,
                MASK_MOD is not None, OWN_BLOCK, STEP_BLOCK, True,
            )),
        ], [4, 1], [240, 24])
    else:
        gl.warp_specialize([
            (consume, (call, descriptors(dv, dv_2), own_later_tiles, 0, "v")),
            (consume, (call, descriptors(dk, dk_2), own_tiles, 0, "k")),
            (produce, (
                loads, memory, own_full.index(0), mask, grid, SCORE_MOD is not None,
                MASK_MOD is not None, OWN_BLOCK, STEP_BLOCK, False,
            )),
        ], [4, 1], [240, 24])
