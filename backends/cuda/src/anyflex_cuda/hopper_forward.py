"""Attention forward on Hopper: a producer warp that loads and consumer warpgroups that compute.

The producer takes tiles of query rows one after the other, reads their rows of the block mask and
has TMA load queries, keys and values into shared memory. It also writes there what it loads
(`smem_mailbox`), so that consumers never read the mask: a tile's place and step counts beside its
queries, a step's range of keys beside the keys. Each consumer keeps 64 rows of the tile in
registers: the product that makes a step's scores overlaps the product of the previous step's
weights with their values (FlashAttention-3: Shah et al., 2024), and one consumer's softmax
overlaps the other's products.

Descriptors, buffers and accumulators are tuples of parts: see `split_tiles`.
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
from anyflex_cuda.packed_tiles import (
    listed_run,
    listed_tile,
    load_bounded,
    load_sequence_keys,
    page_numbers,
    paged_buffers,
    record_of_item,
    said_tile,
    say_tile,
    store_bounded,
    store_first_rows,
    word_of,
)
from anyflex_cuda.skip_unit_rescale import rescaled
from anyflex_cuda.smem_mailbox import WORDS, said, say
from anyflex_cuda.split_tiles import (
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
from anyflex_cuda.write_softmax_stats import with_sinks, write_row_sums
from anyflex_triton.device_functions import (
    FAR,
    FULL,
    ModInputs,
    Mods,
    RowResults,
    bounded_run,
    is_far,
    mask_row,
    pages_of_line,
    record,
    tile_of_program,
    unit_of_scores,
)

__all__ = ["forward_kernel"]


@record
class TileQueries:
    """Each consumer's queries in shared memory, the mailbox words about their tile, and barriers.

    Attributes:
        full: a consumer's queries are loaded.
        passed: barrier at which consumers arrive when they are done with a tile without steps;
            where out shares the queries' buffer, with any tile.
        own_words: words of `packed_tiles.say_tile`; None where queries aren't packed.
        SLOTS: number of tiles whose queries and words there is room for: 1, or 2, so that the next
            tile's queries are loaded while one is computed.
    """

    bufs: Any
    full: Any
    passed: Any
    words: Any
    own_words: Any
    CONSUMERS: Any
    SLOTS: Any


@record
class LoadedTile:
    """A tile's place, and what the producer tells its consumers about it.

    Attributes:
        masked, plain: number of steps that may have dead pairs, and of the other steps.
        first_step: number of the tile's first step, counted over all tiles.
        turn: number of the tile.
        empties, before, earlier: arguments of `await_tile`.
        record: where queries are packed the tile's record of `packed_tile_list`, b then being 0;
            else None.
        lists_steps: whether the record has the tile's runs.
        kv_begin: where queries are packed, the first row of packed keys.
        pages: `anyflex_triton.kernel_records.Pages` of its keys, or None.
    """

    b: Any
    h: Any
    kv_b: Any
    kv_head: Any
    first_row: Any
    masked: Any
    plain: Any
    first_step: Any
    turn: Any
    empties: Any
    before: Any
    earlier: Any
    record: Any = None
    lists_steps: Any = None
    kv_begin: Any = None
    pages: Any = None


@record
class TileOutputs:
    """Descriptors of out and rest, and the shared memory that they are stored from.

    Attributes:
        SHARES_ROOM: whether that memory is the queries' buffer.
    """

    o_descs: Any
    r_descs: Any
    o_bufs: Any
    r_bufs: Any
    SHARES_ROOM: Any


@record
class ConsumerCall:
    """Arguments of a consumer.

    Attributes:
        step_words: mailbox words about the ring's steps.
        mods: `anyflex_triton.kernel_records.Mods`, which prefetch nothing.
        READ_ROWS, READ_TILE, step_mods: for the loop over steps, with what they prefetch.
        results: `anyflex_triton.kernel_records.RowResults`.
        sequences, PAGE: arguments of `forward_kernel`.
        MASKED: whether any step may have dead pairs.
        EVEN, PINNED, SKIPS, APART, CHAINS: arguments of `forward_kernel`.
    """

    queries: Any
    ring: Any
    step_words: Any
    outputs: Any
    tensors: Any
    mask: Any
    results: Any
    tables: Any
    mods: Any
    step_mods: Any
    heads: Any
    q_length: Any
    kv_length: Any
    sequences: Any
    PAGE: Any
    READ_ROWS: Any
    READ_TILE: Any
    MASKED: Any
    EVEN: Any
    PINNED: Any
    SKIPS: Any
    APART: Any
    CHAINS: Any


@record
class SoftmaxState:
    """State of an online softmax.

    Attributes:
        row_max: the largest score so far.
        base: row_max as an exponent of two; weights are relative to 2^base.
        row_sums: four partial row_sums per row, in layout QUARTERS.
        nans: where WANT_MAX, whether a score was NaN; the maximum doesn't propagate NaN.
    """

    row_max: Any
    base: Any
    row_sums: Any
    nans: Any


# Argument lists would be a line an argument.
# fmt: off

QUARTERS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0]], lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 4],
    )
)
"""Layout [ROWS, 4] with one element per row and thread: four threads share two rows of a
product."""


@gluon.jit
def pin(x):
    """Return x, and keep the exponentials that make it before the next wait. ptxas would otherwise
    sink a softmax below the wait for products that it should overlap. This is a scheduling
    barrier: a volatile store, predicated on x being one negative NaN that a row_sum never is."""
    never: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 a; mov.u32 a, 0; setp.eq.u32 p, $1, 0xffc0dead; "
        "@p st.volatile.shared.b32 [a], $1; mov.b32 $0, $1; }"
    )
    return gl.inline_asm_elementwise(
        never, "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1,
    )


@gluon.jit
def handed_over(weights, v_bufs, APART: gl.constexpr):
    """Return weights in the form in which a step hands them to the next: 16-bit values, or, where
    the next step may run in another loop (APART), 32-bit words of two. ptxas would unpack and
    repack 16-bit values in each step."""
    dtype: gl.constexpr = v_bufs[0].dtype
    LAYOUT: gl.constexpr = layout_of_products(v_bufs[0].shape[4])
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
    """Return the result of `handed_over` as an operand of a product."""
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
    mask, run, last_run, kv_length, EVEN: gl.constexpr, BLOCK_N: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Return (number of steps that may have dead pairs, number of others) of a row of runs."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    if mask.HAS_MASK:
        masked = gl.to_tensor(0)
        plain = gl.to_tensor(0)
        for first in range(run, last_run, 32):
            index = first + gl.arange(0, 32, layout=LAYOUT)
            there = index < last_run
            at = mask.runs + index * 3
            begin = gl.load(at, mask=there, other=0) * mask.KV_BLOCK
            end = gl.load(at + 1, mask=there, other=0) * mask.KV_BLOCK
            full = gl.load(at + 2, mask=there, other=0) == FULL
            length = gl.minimum(end, kv_length) - begin
            if PACKED:
                # The mask may be one of other lengths.
                length = gl.maximum(length, 0)
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
def place_of_queries(turn, c, queries):
    """Return the place of consumer `c`'s queries and words about a tile, given its number."""
    if queries.SLOTS == 1:
        return c
    else:
        return turn % queries.SLOTS * queries.CONSUMERS + c


@gluon.jit
def last_awaited(previous, step, queries):
    """Return `await_tile`'s `earlier`, given the first steps of the previous tile and of this one:
    the last step of the tile that had this one's place."""
    if queries.SLOTS == 1:
        return step - 1
    else:
        return previous - 1


@gluon.jit
def await_tile(k_empty, passed, step, empties, before, earlier, STAGES: gl.constexpr):
    """Wait until no consumer reads the queries or mailbox words any more of the tile that had
    their place: each has the scores of that tile's last step, or of a later tile's.

    Args:
        step: number of the next step.
        empties: number of tiles without a step so far; where queries and out share a buffer,
            number of all tiles.
        before: 2 if `passed` signals the end of the previous tile; else 0 or 1.
        earlier: number of that last step, or -1.
    """
    if before == 2:
        mbarrier.wait(passed, (empties - 1) & 1)
    elif (earlier >= 0) & (step - earlier <= STAGES):
        # A later step's load has waited for earlier ones.
        mbarrier.wait(k_empty.index(earlier % STAGES), (earlier // STAGES) & 1)


@gluon.jit
def load_queries(descs, queries, ring, tile, step):
    """Load a tile's query rows, and write its mailbox words, for each consumer."""
    await_tile(
        ring.k_empty, queries.passed, step, tile.empties, tile.before, tile.earlier, ring.STAGES,
    )
    if tile.record is None:
        own = None
        first_row = tile.first_row
    else:
        own = listed_tile(tile.record)
        first_row = own.first_row
    for c in gl.static_range(queries.CONSUMERS):
        at = place_of_queries(tile.turn, c, queries)
        say(queries.words, at * WORDS, first_row)
        say(queries.words, at * WORDS + 1, tile.b)
        say(queries.words, at * WORDS + 2, tile.h)
        say(queries.words, at * WORDS + 3, tile.masked)
        say(queries.words, at * WORDS + 4, tile.plain)
        if own is not None:
            say_tile(queries.own_words, at, own)
        mbarrier.expect(queries.full.index(at), ROWS * descs.D * 2)
        if own is None:
            load_parts(
                descs.q, queries.bufs, at, queries.full.index(at), tile.b, tile.h,
                first_row + c * ROWS,
            )
        else:
            # A consumer without rows takes the first one's, whose results it doesn't store: each
            # box of queries has rows.
            first = first_row + c * ROWS
            first = gl.where(first < own.end_row, first, first_row)
            load_bounded(
                descs.q, queries.bufs, at, queries.full.index(at), tile.h, first, own.end_row,
            )


@gluon.jit
def load_keys(descs, bufs, slot, full, tile, numbers, first, end, page_rows):
    """Load a step's keys, or values, into a slot of each part's buffers.

    Args:
        numbers: from `page_numbers`, where keys are in pages; else None.
        page_rows: of `LoadDescriptors`.
    """
    if tile.record is None:
        load_parts(descs, bufs, slot, full, tile.kv_b, tile.kv_head, first)
    else:
        load_sequence_keys(descs, bufs, slot, full, tile, numbers, first, end, page_rows)


@gluon.jit
def load_step(descs, queries, ring, step_words, tile, step, first, end, full):
    """Load keys and values of a step. A tile's queries are loaded between its first step's keys
    and values, because a slot for keys is free earlier."""
    slot = step % ring.STAGES
    phase = ((step // ring.STAGES) & 1) ^ 1
    numbers = None
    if tile.pages is not None:
        # Read before the wait, which hides it.
        numbers = page_numbers(tile.pages, first, end, descs.k, ring.BLOCK_N)
    mbarrier.wait(ring.k_empty.index(slot), phase)
    say(step_words, slot * WORDS, first)
    say(step_words, slot * WORDS + 1, end)
    say(step_words, slot * WORDS + 2, full)
    mbarrier.expect(ring.k_full.index(slot), ring.BLOCK_N * descs.D * 2)
    load_keys(
        descs.k, ring.k_bufs, slot, ring.k_full.index(slot), tile, numbers, first, end,
        descs.k_page_rows,
    )
    if step == tile.first_step:
        load_queries(descs, queries, ring, tile, step)
    mbarrier.wait(ring.v_empty.index(slot), phase)
    mbarrier.expect(ring.v_full.index(slot), ring.BLOCK_N * descs.DV * 2)
    load_keys(
        descs.v, ring.v_bufs, slot, ring.v_full.index(slot), tile, numbers, first, end,
        descs.v_page_rows,
    )


@gluon.jit
def load_steps(
    descs, queries, ring, step_words, tile, mask, kv_length, run, last_run, step, may_be_dead,
):
    """Load the steps of a row of runs that may have dead pairs (`may_be_dead`), or its other
    steps. Return the number of the next step.

    This is a separate function because Triton visits the body of a loop inside three others 16
    times.
    """
    for r in range(run, last_run):
        if tile.record is not None and mask.HAS_MASK:
            begin, end, full = listed_run(tile, mask, r - run, r, kv_length)
        else:
            begin, end, full = bounded_run(mask.runs, r, mask.KV_BLOCK, kv_length, mask.HAS_MASK)
        middle = begin
        if full:
            middle += (end - begin) // ring.BLOCK_N * ring.BLOCK_N
        if may_be_dead:
            begin = middle
        else:
            end = middle
        for first in range(begin, end, ring.BLOCK_N):
            load_step(
                descs, queries, ring, step_words, tile, step, first, end,
                gl.cast(full, gl.int32),
            )
            step += 1
    return step


@gluon.jit
def load_tile(
    descs, queries, ring, step_words, loaded, mask, kv_length, run, last_run,
    SHARES_ROOM: gl.constexpr,
):
    """Load queries and all steps of a `LoadedTile`. Return (number of the next step, `empties` and
    `before` of the next tile)."""
    step = loaded.first_step
    empties = loaded.empties
    # Steps that may have dead pairs come first. Where APART, the other steps' loop has no mask
    # code.
    for part in range(2):
        step = load_steps(
            descs, queries, ring, step_words, loaded, mask, kv_length, run, last_run, step,
            part == 0,
        )
    if step == loaded.first_step:
        load_queries(descs, queries, ring, loaded, step)
    if SHARES_ROOM or step == loaded.first_step:
        empties += 1
        before = gl.to_tensor(2)
    else:
        before = gl.to_tensor(1)
    return step, empties, before


@gluon.jit
def next_item(at, count, schedule):
    """Return the number of a program's next tile after tile `at` of `count`."""
    if schedule.DYNAMIC:
        following = count
        if gl.num_programs(0) < count:
            # Issued early: the atomic's latency is that of a step.
            following = gl.num_programs(0) + gl.atomic_add(schedule.counter, 1, sem="relaxed")
    else:
        following = at + gl.num_programs(0)
    return following


@gluon.jit
def ticket_of(count, schedule):
    """Take the number of a program's next tile but one, and return it across the lanes of a warp,
    whose sum it is, in flight. As PTX because `gl.atomic_add` waits for its result."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lanes = gl.arange(0, 32, layout=LAYOUT)
    text: gl.constexpr = (
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u32 $0, 0; "
        "@p atom.relaxed.gpu.global.inc.u32 $0, [$1], 0x7fffffff; }"
    )
    takes = gl.where((lanes == 0) & (gl.num_programs(0) < count), 1, 0)
    return gl.inline_asm_elementwise(
        text, "=r,l,r", [schedule.counter + lanes * 0, takes], dtype=gl.int32, is_pure=False,
        pack=1,
    )


@gluon.jit
def produce_packed(
    descs, queries, ring, step_words, mask, schedule, SHARES_ROOM: gl.constexpr,
):
    """Produce tiles of packed queries, in the order of their list. Return what `load_tile`
    returns, the last tile's first step, and the number of tiles.

    While a tile is loaded, the next one's record and the number of the one after it are in flight:
    tiles of short sequences would wait for both.
    """
    step = gl.to_tensor(0)
    empties = gl.to_tensor(0)
    before = gl.to_tensor(0)
    previous = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    tiles = gl.load(schedule.tile_list)
    lists_steps = gl.load(schedule.tile_list + 1)
    count = tiles * schedule.heads
    at = gl.program_id(0)
    record, h = record_of_item(at, tiles, schedule)
    if schedule.DYNAMIC:
        ticket = ticket_of(count, schedule)
    while at < count:
        following = at + gl.num_programs(0)
        if schedule.DYNAMIC:
            following = gl.num_programs(0) + gl.sum(ticket, 0)
            ticket = ticket_of(count, schedule)
        next_record, next_h = record_of_item(following, tiles, schedule)
        kv_length = word_of(record, 7)
        pages = None
        if schedule.PAGE > 0:
            pages = pages_of_line(schedule.sequences, word_of(record, 8), schedule.PAGE)
        run = word_of(record, 9)
        last_run = word_of(record, 10)
        masked = word_of(record, 11)
        plain = word_of(record, 12)
        if mask.HAS_MASK:  # noqa: SIM102  the other is known at run time alone
            if lists_steps == 0:
                run, last_run = mask_row(
                    mask.offsets, mask.ends, mask.strides, 0 * h, h, word_of(record, 0), True,
                )
                masked, plain = count_steps(
                    mask, run, last_run, kv_length, False, ring.BLOCK_N, True,
                )
        loaded = LoadedTile(
            b=0 * h, h=h, kv_b=0 * h, kv_head=h // schedule.GROUP, first_row=None,
            masked=masked, plain=plain, first_step=step, turn=turn, empties=empties, before=before,
            earlier=last_awaited(previous, step, queries), record=record, lists_steps=lists_steps,
            kv_begin=word_of(record, 6), pages=pages,
        )
        previous = step
        turn += 1
        step, empties, before = load_tile(
            descs, queries, ring, step_words, loaded, mask, kv_length, run, last_run, SHARES_ROOM,
        )
        at = following
        record = next_record
        h = next_h
    return step, empties, before, previous, turn


@gluon.jit
def produce_dense(
    descs, queries, ring, step_words, mask, schedule, kv_length, EVEN: gl.constexpr,
    SHARES_ROOM: gl.constexpr,
):
    """Produce the tiles of dense queries. Return what `produce_packed` returns."""
    BLOCK_M: gl.constexpr = queries.CONSUMERS * ROWS
    step = gl.to_tensor(0)
    empties = gl.to_tensor(0)
    before = gl.to_tensor(0)
    previous = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    count = schedule.tiles * schedule.batch_heads
    at = gl.program_id(0)
    while at < count:
        following = next_item(at, count, schedule)
        tile, bh = tile_of_program(at, schedule.tiles, schedule.batch_heads, schedule.head_group)
        b = bh // schedule.heads
        h = bh % schedule.heads
        kv_head = h // schedule.GROUP
        kv_b = 0 * b if schedule.KV_SHARED else b
        if mask.HAS_MASK:  # noqa: SIM102  the other is known at run time alone
            if schedule.ordered:
                strides = schedule.order_strides
                tile = gl.load(schedule.tile_order + b * strides[0] + h * strides[1] + tile)
        first_row = tile * BLOCK_M
        if mask.HAS_MASK:
            run, last_run = mask_row(
                mask.offsets, mask.ends, mask.strides, b, h, first_row // mask.Q_BLOCK,
            )
        else:
            run = gl.to_tensor(0)
            last_run = gl.to_tensor(1)
        masked, plain = count_steps(mask, run, last_run, kv_length, EVEN, ring.BLOCK_N, False)
        loaded = LoadedTile(
            b=b, h=h, kv_b=kv_b, kv_head=kv_head, first_row=first_row, masked=masked, plain=plain,
            first_step=step, turn=turn, empties=empties, before=before,
            earlier=last_awaited(previous, step, queries),
        )
        previous = step
        turn += 1
        step, empties, before = load_tile(
            descs, queries, ring, step_words, loaded, mask, kv_length, run, last_run, SHARES_ROOM,
        )
        at = following
    return step, empties, before, previous, turn


@gluon.jit
def produce(
    descs, queries, ring, step_words, mask, schedule, kv_length, EVEN: gl.constexpr,
    SHARES_ROOM: gl.constexpr,
):
    if schedule.sequences is None:
        step, empties, before, previous, turn = produce_dense(
            descs, queries, ring, step_words, mask, schedule, kv_length, EVEN, SHARES_ROOM,
        )
    else:
        step, empties, before, previous, turn = produce_packed(
            descs, queries, ring, step_words, mask, schedule, SHARES_ROOM,
        )
    # Tell the consumers that there are no more tiles.
    earlier = last_awaited(previous, step, queries)
    await_tile(ring.k_empty, queries.passed, step, empties, before, earlier, ring.STAGES)
    for c in gl.static_range(queries.CONSUMERS):
        at = place_of_queries(turn, c, queries)
        say(queries.words, at * WORDS, -1)
        mbarrier.arrive(queries.full.index(at), count=1)


# The consumers

@gluon.jit
def said_of_step(
    step_words, slot, masked, MASKED: gl.constexpr, EVEN: gl.constexpr, ALWAYS: gl.constexpr
):
    """Return (first key, end, whether FULL) of a step, as far as its weights need them. Call it
    before the step's slot is released.

    Args:
        ALWAYS: whether the first key is needed without a mask too.
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
def tables_of_step(inputs, mods, first, kv_length, BLOCK_N: gl.constexpr):
    """Return `inputs.tables` with the captured values that a step's keys alone decide. Each thread
    loads one key's, while products run; in the layout of scores it would load a quarter of them
    one by one."""
    if mods.READ_COLUMNS is None:
        return inputs.tables
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        keys = gl.minimum(first + gl.arange(0, BLOCK_N, layout=LAYOUT), kv_length - 1)
        return mods.READ_COLUMNS(
            inputs.b, inputs.h, keys + mods.shifts[3], inputs.tables, mods.ints, mods.floats,
        )


@gluon.jit
def with_pairs(tables, inputs, mods, first, BLOCK_N: gl.constexpr):
    """Return tables of `tables_of_step` with the captured values of a step's pairs. Call it when
    products were issued: one read may wait for another, and they for both."""
    if mods.READ_STEP is None:
        return tables
    else:
        return mods.READ_STEP(
            inputs.b, inputs.h, inputs.q_idx, inputs.first_q, first + mods.shifts[3], inputs.read,
            tables, mods.ints, mods.floats, BLOCK_N,
        )


@gluon.jit
def largest_of(scores, S_LAYOUT: gl.constexpr, CHAINS: gl.constexpr):
    """Return each row's largest score. A thread holds a quarter of each of its two rows, and
    reduces it in CHAINS independent chains of operations."""
    if CHAINS == 1:
        return gl.max(scores, 1)
    else:
        gl.static_assert(CHAINS % 2 == 0 and scores.shape[1] % (4 * CHAINS) == 0)
        # A thread holds two of each eight columns, so nothing moves between threads before the
        # last maximum, over QUARTERS.
        parts = scores.reshape([ROWS, scores.shape[1] // (4 * CHAINS), CHAINS // 2, 4, 2])
        parts = gl.max(gl.max(gl.max(parts, 1), 3), 1)
        parts = gl.convert_layout(parts, QUARTERS, assert_trivial=True)
        OF_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
        return gl.convert_layout(gl.max(parts, 1), OF_ROWS, assert_trivial=True)


@gluon.jit
def weights_of(
    raw, softmax, first, end, full, masked, inputs, kv_length, mods, call, MASKED: gl.constexpr,
    EVEN: gl.constexpr,
):
    """Return (weights, alpha, SoftmaxState) after one step of the online softmax, as in
    `anyflex_triton.forward.forward_step`.

    Args:
        raw: products of the step. masked: where MASKED, whether some pair of the step may be dead.
        inputs: `ModInputs`, whose tables have been read for this step.
    """
    BLOCK_N: gl.constexpr = call.ring.BLOCK_N
    S_LAYOUT: gl.constexpr = layout_of_products(BLOCK_N)
    # EVEN: tiles end with the keys, so no FULL step has dead pairs.
    scores = scores_of_step(
        raw, first, end, None if EVEN else full, masked, inputs, kv_length, mods, MASKED,
        EVEN, S_LAYOUT, BLOCK_N,
    )
    nans = softmax.nans
    if call.results.WANT_MAX:
        nans = gl.maximum(nans, gl.max((scores != scores).to(gl.int32), 1))
    unit = unit_of_scores(mods.scale, mods.SCORE_MOD)
    row_max = gl.maximum(softmax.row_max, largest_of(scores, S_LAYOUT, call.CHAINS))
    base = row_max * unit
    shift = gl.where(base <= -FAR, 0.0, base)
    weights = gl.exp2(scores * unit - gl.expand_dims(shift, 1))
    alpha = gl.exp2(softmax.base - shift)
    # Each thread sums its own weights; the partial sums are added up when the tile ends.
    parts = gl.sum(gl.sum(weights.reshape([ROWS, BLOCK_N // 8, 4, 2]), 3), 1)
    parts = gl.convert_layout(parts, QUARTERS, assert_trivial=True)
    factors = gl.convert_layout(alpha, gl.SliceLayout(1, QUARTERS), assert_trivial=True)
    row_sums = softmax.row_sums * gl.expand_dims(factors, 1) + parts
    if call.PINNED:
        row_sums = pin(row_sums)
    return weights, alpha, SoftmaxState(row_max=row_max, base=base, row_sums=row_sums, nans=nans)


@gluon.jit
def products_of_keys(q_bufs, k_bufs, place, slot, S_LAYOUT: gl.constexpr):
    """Return a step's scores, in flight.

    Args:
        place: from `place_of_queries`.
    """
    BLOCK_N: gl.constexpr = k_bufs[0].shape[3]
    later = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=S_LAYOUT)
    for p in gl.static_range(len(k_bufs)):
        q = q_bufs[p].index(place).reshape([ROWS, q_bufs[p].shape[4]])
        k = k_bufs[p].index(slot).reshape([BLOCK_N, k_bufs[p].shape[4]]).permute((1, 0))
        later = warpgroup_mma(q, k, later, use_acc=p > 0, is_async=True)
    return later


@gluon.jit
def products_of_handed(handed, v_bufs, slot, acc, APART: gl.constexpr):
    """Return `products_of_values` for weights that were `handed_over`."""
    FIRST: gl.constexpr = layout_of_products(acc[0].shape[1])
    return products_of_values(
        operand_of(handed, v_bufs[0].dtype, FIRST, APART), v_bufs, slot, acc,
    )


@gluon.jit
def multiplied(acc, factors, SKIPS: gl.constexpr):
    """Return a part's accumulator times a factor per row.

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
    """Apply `multiplied` to each part."""
    products = acc[:0]
    for p in gl.static_range(len(acc)):
        products = products + (multiplied(acc[p], factors, SKIPS),)
    return products


@gluon.jit
def with_tables(inputs, tables):
    """Return `inputs`, `ModInputs`, with other tables."""
    return ModInputs(b=inputs.b, h=inputs.h, q_idx=inputs.q_idx, kv_idx=None, tables=tables)


@gluon.jit
def advance(
    step, handed, acc, softmax, masked, inputs, kv_length, mods, call, place,
    MASKED: gl.constexpr, EVEN: gl.constexpr,
):
    """Take one step: issue its scores, multiply the previous step's weights (`handed`) with their
    values meanwhile, then make its weights."""
    ring = call.ring
    S_LAYOUT: gl.constexpr = layout_of_products(ring.BLOCK_N)
    ALWAYS: gl.constexpr = mods.SCORE_MOD is not None or mods.READ_COLUMNS is not None
    slot = step % ring.STAGES
    before = (step - 1) % ring.STAGES
    mbarrier.wait(ring.k_full.index(slot), (step // ring.STAGES) & 1)
    first, end, full = said_of_step(call.step_words, slot, masked, MASKED, EVEN, ALWAYS)
    if call.APART and MASKED:
        # This condition is always true where all steps of the loop are masked, which compilers
        # must not see. Behind a branch they evaluate the mask pair by pair; without one they hoist
        # all pairs' conditions above the scores and keep them as bits.
        masked = said(call.step_words, slot * WORDS + 2) >= 0
    tables = tables_of_step(inputs, mods, first, kv_length, ring.BLOCK_N)
    raw_later = products_of_keys(call.queries.bufs, ring.k_bufs, place, slot, S_LAYOUT)
    mbarrier.wait(ring.v_full.index(before), ((step - 1) // ring.STAGES) & 1)
    acc_later = products_of_handed(handed, ring.v_bufs, before, acc, call.APART)
    tables = with_pairs(tables, inputs, mods, first, ring.BLOCK_N)
    raw = warpgroup_mma_wait(num_outstanding=len(acc_later), deps=(raw_later,))
    mbarrier.arrive(ring.k_empty.index(slot), count=1)
    weights, alpha, softmax = weights_of(
        raw, softmax, first, end, full, masked, with_tables(inputs, tables), kv_length, mods, call,
        MASKED, EVEN,
    )
    acc = awaited(acc_later, 0)
    mbarrier.arrive(ring.v_empty.index(before), count=1)
    acc = all_multiplied(acc, alpha, call.SKIPS)
    handed = handed_over(weights, ring.v_bufs, call.APART)
    return handed, acc, softmax


@gluon.jit
def consume(call, ME: gl.constexpr):
    """Compute the rows of all tiles that belong to consumer ME.

    Args:
        call: `ConsumerCall`.
    """
    queries = call.queries
    ring = call.ring
    outputs = call.outputs
    S_LAYOUT: gl.constexpr = layout_of_products(ring.BLOCK_N)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    SCORE_MOD: gl.constexpr = call.mods.SCORE_MOD
    APART: gl.constexpr = call.APART
    SHARES_ROOM: gl.constexpr = outputs.SHARES_ROOM
    MASKED: gl.constexpr = call.MASKED
    EVEN: gl.constexpr = call.EVEN
    WANT_REST: gl.constexpr = call.tensors.WANT_REST
    shifts = call.mods.shifts
    scale = call.mods.scale
    mods = call.step_mods
    ALWAYS: gl.constexpr = mods.SCORE_MOD is not None or mods.READ_COLUMNS is not None
    step = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    place = place_of_queries(turn, ME, queries)
    mbarrier.wait(queries.full.index(place), 0)
    first_row = said(queries.words, place * WORDS)
    while first_row >= 0:
        b = said(queries.words, place * WORDS + 1)
        h = said(queries.words, place * WORDS + 2)
        masked = said(queries.words, place * WORDS + 3)
        steps = masked + said(queries.words, place * WORDS + 4)
        first_row += ME * ROWS
        mod_b = b + shifts[0]
        mod_h = h + shifts[1]
        if call.sequences is None:
            own = None
            end_row = call.q_length
            q_shift = shifts[2]
            kv_length = call.kv_length
        else:
            own = said_tile(queries.own_words, place, first_row)
            mod_b += own.b
            end_row = own.end_row
            q_shift = shifts[2] + own.shift
            kv_length = own.kv_length
        rows = first_row + gl.arange(0, ROWS, layout=OF_ROWS)
        q_idx = gl.expand_dims(gl.minimum(rows, end_row - 1), 1) + q_shift
        if call.READ_ROWS is not None:
            read = call.READ_ROWS(mod_b, mod_h, q_idx, call.tables, mods.ints, mods.floats)
        else:
            read = call.tables
        of_tile = None
        if call.READ_TILE is not None:
            of_tile = call.READ_TILE(mod_b, mod_h, q_idx, call.tables, mods.ints, mods.floats)
        inputs = ModInputs(
            b=mod_b, h=mod_h, q_idx=q_idx, kv_idx=None, tables=read, first_q=first_row + q_shift,
            read=of_tile,
        )
        softmax = SoftmaxState(
            row_max=gl.full([ROWS], float("-inf"), gl.float32, layout=OF_ROWS),
            base=gl.full([ROWS], float("-inf"), gl.float32, layout=OF_ROWS),
            row_sums=gl.full([ROWS, 4], 0.0, gl.float32, layout=QUARTERS),
            nans=gl.full([ROWS], 0, gl.int32, layout=OF_ROWS),
        )
        acc = ring.v_bufs[:0]
        for p in gl.static_range(len(ring.v_bufs)):
            acc = acc + (zeros_of(ring.v_bufs[p].shape[4]),)
        if steps > 0:
            slot = step % ring.STAGES
            mbarrier.wait(ring.k_full.index(slot), (step // ring.STAGES) & 1)
            first, end, full = said_of_step(
                call.step_words, slot, masked > 0, MASKED, EVEN, ALWAYS,
            )
            first_read = tables_of_step(inputs, mods, first, kv_length, ring.BLOCK_N)
            raw_later = products_of_keys(queries.bufs, ring.k_bufs, place, slot, S_LAYOUT)
            first_read = with_pairs(first_read, inputs, mods, first, ring.BLOCK_N)
            raw = warpgroup_mma_wait(num_outstanding=0, deps=(raw_later,))
            mbarrier.arrive(ring.k_empty.index(slot), count=1)
            weights, _alpha, softmax = weights_of(
                raw, softmax, first, end, full, masked > 0, with_tables(inputs, first_read),
                kv_length, mods, call, MASKED, EVEN,
            )
            handed = handed_over(weights, ring.v_bufs, APART)
            step += 1
            # Steps that may have dead pairs come first.
            for i in range(1, masked if APART else steps):
                handed, acc, softmax = advance(
                    step, handed, acc, softmax, i < masked, inputs, kv_length, mods, call, place,
                    MASKED, EVEN,
                )
                step += 1
            if APART:
                for _ in range(gl.maximum(masked, 1), steps):
                    handed, acc, softmax = advance(
                        step, handed, acc, softmax, False, inputs, kv_length, mods, call, place,
                        False, True,
                    )
                    step += 1
            slot = (step - 1) % ring.STAGES
            mbarrier.wait(ring.v_full.index(slot), ((step - 1) // ring.STAGES) & 1)
            acc = awaited(products_of_handed(handed, ring.v_bufs, slot, acc, APART), 0)
            mbarrier.arrive(ring.v_empty.index(slot), count=1)
        elif not SHARES_ROOM:
            mbarrier.arrive(queries.passed, count=1)
        row_max = softmax.row_max
        base = softmax.base
        row_sum = gl.convert_layout(gl.sum(softmax.row_sums, 1), OF_ROWS, assert_trivial=True)
        # Non-finite values also reach rows that don't see them, because 0 * NaN is NaN; and the
        # weights of far rows have lost their precision.
        inexact = is_far(row_max, base)
        for p in gl.static_range(len(acc)):
            none = gl.convert_layout(gl.sum(acc[p] * 0.0, 1), OF_ROWS)
            inexact |= none != none
        # Correct for rounding: weights are relative to base, not to row_max.
        excess = gl.fma(row_max, 0.0 - unit_of_scores(scale, SCORE_MOD), base)
        whole = with_sinks(row_sum, row_max, base, h, call.results)
        if gl.max(inexact.to(gl.int32), 0) > 0:
            row_max, row_sum, whole = write_nonfinite_rows(
                call.tensors, call.mask, call.mods, call.tables, call.results, b, h, first_row,
                end_row, kv_length, ROWS, OF_ROWS, own=own, sequences=call.sequences,
                PAGE=call.PAGE,
            )
            excess = gl.full([ROWS], 0.0, gl.float32, layout=OF_ROWS)
        else:
            # A row without a live pair has row_sum 0 and gives 0. NaN stays NaN.
            dead = (row_max == float("-inf")) & (row_sum == row_sum)
            inverse = gl.where(dead, 0.0, 1.0 / gl.where(dead, 1.0, whole))
            acc = all_multiplied(acc, inverse, False)
            # TMA may still read the previous tile's rows.
            tma.store_wait(0)
            place_parts(acc, outputs.o_bufs, ME, False)
            if WANT_REST and not SHARES_ROOM:
                place_parts(acc, outputs.r_bufs, ME, True)
            fence_async_shared()
            if own is None:
                store_parts(outputs.o_descs, outputs.o_bufs, ME, b, h, first_row)
            elif first_row < end_row:
                if end_row < ROWS:
                    store_first_rows(acc, call.tensors, h, first_row, end_row)
                else:
                    store_bounded(outputs.o_descs, outputs.o_bufs, ME, h, first_row, end_row)
            if WANT_REST:
                if SHARES_ROOM:
                    tma.store_wait(0)
                    place_parts(acc, outputs.r_bufs, ME, True)
                    fence_async_shared()
                store_parts(outputs.r_descs, outputs.r_bufs, ME, b, h, first_row)
        at = gl.cast(b * call.heads + h, gl.int64) * call.q_length + rows
        write_row_sums(
            row_max, row_sum, whole, excess, softmax.nans, at, rows < end_row, scale, call.results,
        )
        if SHARES_ROOM:
            tma.store_wait(0)
            mbarrier.arrive(queries.passed, count=1)
        turn += 1
        if queries.SLOTS > 1:
            place = place_of_queries(turn, ME, queries)
        mbarrier.wait(queries.full.index(place), (turn // queries.SLOTS) & 1)
        first_row = said(queries.words, place * WORDS)
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, r_desc, q2_desc, k2_desc, v2_desc, o2_desc, r2_desc, query,
    key, value, out, rest, q_strides, k_strides, v_strides, o_strides, r_strides, tops, lse,
    max_scores, counter, offsets, ends, runs, mask_strides, tile_order, order_strides, ordered,
    tables, ints, floats, shifts, scale, sinks, sequences, tile_list, batch_heads, heads,
    q_length, kv_length, tiles, head_group, SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr,
    READ_ROWS: gl.constexpr, READ_COLUMNS: gl.constexpr, SCORE_MOD_OF_READ: gl.constexpr,
    MASK_SCORES: gl.constexpr, READ_TILE: gl.constexpr, READ_STEP: gl.constexpr,
    HAS_MASK: gl.constexpr, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, PAGE: gl.constexpr,
    GROUP: gl.constexpr, KV_SHARED: gl.constexpr, DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    D: gl.constexpr, DV: gl.constexpr, WANT_LSE: gl.constexpr, WANT_MAX: gl.constexpr,
    WANT_REST: gl.constexpr, EVEN: gl.constexpr, DYNAMIC: gl.constexpr, PINNED: gl.constexpr,
    SKIPS: gl.constexpr, APART: gl.constexpr, CHAINS: gl.constexpr, SHARES_ROOM: gl.constexpr,
    CONSUMERS: gl.constexpr, QUERY_SLOTS: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):
    """Forward kernel: each program takes tiles of 64 * CONSUMERS query rows of one head until none
    are left.

    Args:
        q_desc, k_desc, v_desc, o_desc, r_desc: descriptors [B, H, rows, dims] of boxes of 64 or
            BLOCK_N rows, D or DV columns, or where there are second parts (q2_desc), the columns
            of the first. Without WANT_REST rest's arguments are None. Where queries are packed
            they are those of `packed_forward_call.bounded_boxes`.
        query, key, value, out, rest: pointers for `write_nonfinite_rows`, with strides (b, h,
            row) in elements.
        counter: used where DYNAMIC and programs are fewer than tiles.
        sequences: see `anyflex_triton.kernel_arguments`.
        tile_list: where sequences are given, what `packed_tile_list.tile_kernel` wrote. Else tiles
            is the number of tiles of a head.
        Q_BLOCK: a multiple of a tile's rows.
        PINNED: whether a step's softmax overlaps the product of the previous weights: see `pin`.
        SKIPS: whether warps skip rescaling by factors of 1: see `rescaled`.
        APART: whether steps that may have dead pairs have a loop of their own.
        CHAINS: argument of `largest_of`.
        SHARES_ROOM: whether out and rest are stored from the queries' buffers, because shared
            memory has no room for both; their parts are as wide as the queries' first ones.
    """
    ONE_ROW: gl.constexpr = mbarrier.MBarrierLayout()
    WORD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    MASKED: gl.constexpr = HAS_MASK or not EVEN
    q_descs = descriptors(q_desc, q2_desc)
    k_descs = descriptors(k_desc, k2_desc)
    v_descs = descriptors(v_desc, v2_desc)
    o_descs = descriptors(o_desc, o2_desc)
    r_descs = descriptors(r_desc, r2_desc)
    q_bufs = buffers(q_descs, CONSUMERS * QUERY_SLOTS)
    if SHARES_ROOM:
        o_bufs = q_bufs[: len(o_descs)]
    else:
        o_bufs = buffers(o_descs, CONSUMERS)
    if WANT_REST and not SHARES_ROOM:
        r_bufs = buffers(r_descs, CONSUMERS)
    else:
        r_bufs = o_bufs
    if PAGE == 0:
        k_bufs = buffers(k_descs, STAGES)
        v_bufs = buffers(v_descs, STAGES)
    else:
        k_bufs = paged_buffers(k_descs, STAGES, BLOCK_N, D)
        v_bufs = paged_buffers(v_descs, STAGES, BLOCK_N, DV)
    tile_words = gl.allocate_shared_memory(
        gl.int32, [CONSUMERS * QUERY_SLOTS * WORDS, 1], WORD
    )
    step_words = gl.allocate_shared_memory(gl.int32, [STAGES * WORDS, 1], WORD)
    own_words = None
    if sequences is not None:
        own_words = gl.allocate_shared_memory(
            gl.int32, [CONSUMERS * QUERY_SLOTS * WORDS, 1], WORD
        )
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS * QUERY_SLOTS, 1], ONE_ROW)
    passed = gl.allocate_shared_memory(gl.int64, [1], ONE_ROW)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE_ROW)
    for c in gl.static_range(CONSUMERS * QUERY_SLOTS):
        mbarrier.init(q_full.index(c), count=1)
    mbarrier.init(passed, count=CONSUMERS)
    for s in gl.static_range(STAGES):
        mbarrier.init(k_full.index(s), count=1)
        mbarrier.init(v_full.index(s), count=1)
        mbarrier.init(k_empty.index(s), count=CONSUMERS)
        mbarrier.init(v_empty.index(s), count=CONSUMERS)
    fence_async_shared()
    k_page_rows = None
    v_page_rows = None
    if PAGE > 0:
        k_page_rows = gl.cast(k_strides[0] // k_strides[2], gl.int32)
        v_page_rows = gl.cast(v_strides[0] // v_strides[2], gl.int32)
    descs = LoadDescriptors(
        q=q_descs, k=k_descs, v=v_descs, D=D, DV=DV, k_page_rows=k_page_rows,
        v_page_rows=v_page_rows,
    )
    queries = TileQueries(
        bufs=q_bufs, full=q_full, passed=passed, words=tile_words, own_words=own_words,
        CONSUMERS=CONSUMERS, SLOTS=QUERY_SLOTS,
    )
    ring = KeyRing(
        k_bufs=k_bufs, v_bufs=v_bufs, k_full=k_full, k_empty=k_empty, v_full=v_full,
        v_empty=v_empty, STAGES=STAGES, BLOCK_N=BLOCK_N,
    )
    mask = MaskRuns(
        offsets=offsets, ends=ends, runs=runs, strides=mask_strides, HAS_MASK=HAS_MASK,
        Q_BLOCK=Q_BLOCK, KV_BLOCK=KV_BLOCK,
    )
    schedule = TileSchedule(
        counter=counter, tile_order=tile_order, order_strides=order_strides, ordered=ordered,
        batch_heads=batch_heads, heads=heads, tiles=tiles, head_group=head_group, GROUP=GROUP,
        KV_SHARED=KV_SHARED, DYNAMIC=DYNAMIC, sequences=sequences, tile_list=tile_list,
        PAGE=PAGE,
    )
    call = ConsumerCall(
        queries=queries, ring=ring, step_words=step_words,
        outputs=TileOutputs(
            o_descs=o_descs, r_descs=r_descs, o_bufs=o_bufs, r_bufs=r_bufs,
            SHARES_ROOM=SHARES_ROOM,
        ),
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
        step_mods=StepMods(
            ints=ints, floats=floats, shifts=shifts, scale=scale, READ_COLUMNS=READ_COLUMNS,
            SCORE_MOD=SCORE_MOD_OF_READ, MASK_SCORES=MASK_SCORES, READ_STEP=READ_STEP,
        ),
        heads=heads, q_length=q_length, kv_length=kv_length, sequences=sequences, PAGE=PAGE,
        READ_ROWS=READ_ROWS, READ_TILE=READ_TILE, MASKED=MASKED, EVEN=EVEN, PINNED=PINNED,
        SKIPS=SKIPS, APART=APART, CHAINS=CHAINS,
    )
    # Spelled out: constexprs stop being constexpr when they pass through a named or concatenated
    # tuple.
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (call, 0)),
            (produce, (
                descs, queries, ring, step_words, mask, schedule, kv_length, EVEN, SHARES_ROOM,
            )),
        ], [1], [PRODUCER_REGISTERS])
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (call, 0)),
            (consume, (call, 1)),
            (produce, (
                descs, queries, ring, step_words, mask, schedule, kv_length, EVEN, SHARES_ROOM,
            )),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])
    else:
        gl.warp_specialize([
            (consume, (call, 0)),
            (consume, (call, 1)),
            (consume, (call, 2)),
            (produce, (
                descs, queries, ring, step_words, mask, schedule, kv_length, EVEN, SHARES_ROOM,
            )),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])
