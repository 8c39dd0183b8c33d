"""Keys and values stored in 8 bits as operands of products in float16.

Float16 holds int8 and float8_e4m3 exactly, and takes fewer instructions to convert to than
bfloat16. Queries are divided by a power of two, which scores are multiplied by again. Weights are
multiplied by the scales of values, relative to the largest scale so far. Words of four stored
numbers are loaded in the order of registers that the products take. So the columns of keys and
values are permuted: queries' columns too before the product, and the sums' columns after the last.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from anyflex_cuda.packed_steps import page_at
from anyflex_cuda.split_tiles import reinterpret
from anyflex_triton.device_functions import nonfinite

__all__ = [
    "LEAST_SCALE",
    "LOADING_THREADS",
    "STORED_COLUMNS",
    "STORED_PRODUCTS",
    "load_step_scales",
    "natural_columns",
    "scale_pointers",
    "stored_products",
    "stored_queries",
    "stored_scores",
]

# Argument lists would be a line an argument.
# fmt: off

# Triton 3.8 renames this function.
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

STORED_COLUMNS = gl.constexpr(128)
"""Columns of a tile: a row is 128 bytes, as wide as the swizzle, and narrower heads are padded."""
LOADING_THREADS = gl.constexpr(32)
"""Number of threads that copy scales, each of which arrives at the barrier of keys."""
LEAST_SCALE = gl.constexpr(1e-37)
"""Lower bound of what scales are divided by: its inverse is finite."""
STORED_PRODUCTS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 4], instr_shape=[16, 8])
)
"""Layout of scores and sums: each warp has other keys, then other columns."""
_LEFT = gl.constexpr(gl.DotOperandLayout(0, STORED_PRODUCTS, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, STORED_PRODUCTS, 2))
_KEY_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [32, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0]], [], [64, 32],
    )
)
"""Layout of words [64 keys, 32]: a thread has 32 bytes of two keys. Lanes of a phase read distinct
banks."""
_VALUE_WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0], [32, 0]], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        [[0, 8], [0, 16]], [], [64, 32],
    )
)
"""Layout of words [64 keys, 32]: a thread has a word of 16 keys. Lanes read distinct banks."""
_WORDS = gl.constexpr(gl.NVMMASharedLayout.get_default_for([1, 1, 64, 32], gl.int32))
_INTERLEAVED = gl.constexpr("prmt.b32 lo, a, b, 0x5140; prmt.b32 hi, a, b, 0x7362; ")
"""Puts numbers of one place in two words beside each other."""
_APART = gl.constexpr("mov.b32 lo, a; mov.b32 hi, b; ")
# 0x6400 is 1024, so a byte behind 0x64 is 1024 more than itself. 0x6480 is 1152.
_OF_INT8 = gl.constexpr((
    "{ .reg .b32 a, b, c, lo, hi; xor.b32 a, $4, 0x80808080; xor.b32 b, $5, 0x80808080; ",
    "mov.b32 c, 0x64806480; "
    "prmt.b32 a, lo, 0x64646464, 0x4140; sub.f16x2 $0, a, c; "
    "prmt.b32 a, lo, 0x64646464, 0x4342; sub.f16x2 $1, a, c; "
    "prmt.b32 a, hi, 0x64646464, 0x4140; sub.f16x2 $2, a, c; "
    "prmt.b32 a, hi, 0x64646464, 0x4342; sub.f16x2 $3, a, c; }",
))
_OF_FLOAT8 = gl.constexpr((
    "{ .reg .b32 a, b, lo, hi; .reg .b16 c, d; mov.b32 a, $4; mov.b32 b, $5; ",
    "mov.b32 {c, d}, lo; cvt.rn.f16x2.e4m3x2 $0, c; cvt.rn.f16x2.e4m3x2 $1, d; "
    "mov.b32 {c, d}, hi; cvt.rn.f16x2.e4m3x2 $2, c; cvt.rn.f16x2.e4m3x2 $3, d; }",
))


@gluon.jit
def words_of(bufs, slot, LAYOUT: gl.constexpr):
    """Load a slot's rows as words of four stored numbers."""
    SHAPE: gl.constexpr = [bufs.shape[0], 1, 1, bufs.shape[3], STORED_COLUMNS // 4]
    WORDS: gl.constexpr = _WORDS
    words = reinterpret(bufs, gl.int32, SHAPE, WORDS)
    return words.index(slot).reshape([bufs.shape[3], STORED_COLUMNS // 4]).load(LAYOUT)


@gluon.jit
def converted(words, STORED: gl.constexpr, ORDER: gl.constexpr):
    """Return [rows, words, 2, 2], the stored numbers in float16.

    Two words of a thread are converted at a time to four registers of two numbers. The last two
    dimensions are the lower and the higher bit of a register's number. With the ORDER
    _INTERLEAVED, a register has the numbers of one place of both words, in the order of words.
    With _APART the first two registers have the first word's numbers, in their order.
    """
    TEXTS: gl.constexpr = _OF_INT8 if STORED == "int8" else _OF_FLOAT8
    TEXT: gl.constexpr = TEXTS[0] + ORDER + TEXTS[1]
    registers = gl.inline_asm_elementwise(
        TEXT, "=r,=r,=r,=r,r,r", [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
    )
    return gl.join(gl.join(registers[0], registers[1]), gl.join(registers[2], registers[3]))


@gluon.jit
def stored_queries(q):
    """Return (query rows as an operand, what scores of each row are to be multiplied by).

    Args:
        q: [rows, STORED_COLUMNS], in a 16-bit type.
    """
    ROWS: gl.constexpr = q.shape[0]
    q = q.to(gl.float32)
    size = gl.max(gl.where(nonfinite(q), 0.0, gl.abs(q)), 1)
    power = gl.exp2(gl.floor(gl.log2(gl.maximum(size, LEAST_SCALE))))
    q = q * gl.expand_dims(1.0 / power, 1)
    # A column's number has bits (t1 t0 h w1 w0 b1 b0): see `stored_scores`.
    q = q.reshape([ROWS, 4, 2, 2, 2, 2, 2]).permute((0, 2, 3, 4, 5, 1, 6))
    # Rounding comes last: registers that are loaded four at a time would be moved in each step.
    q = gl.convert_layout(q.reshape([ROWS, STORED_COLUMNS]), _LEFT).to(gl.float16)
    return q, gl.convert_layout(power, gl.SliceLayout(1, STORED_PRODUCTS))


@gluon.jit
def stored_scores(queries, ring, slot, STORED: gl.constexpr):
    """Return the products of a unit's queries and a slot's keys, times their scales.

    Args:
        queries: from `stored_queries`.
        ring: `hopper_decode.DecodeRing`.
    """
    operand, power = queries
    ROWS: gl.constexpr = operand.shape[0]
    KEYS: gl.constexpr = ring.k_bufs.shape[3]
    k = converted(words_of(ring.k_bufs, slot, _KEY_WORDS), STORED, _APART)
    # A word's number has bits (t1 t0 h w1 w0), its numbers' places (b1 b0). A thread has all but
    # t. Registers have w0 and b1 in their number, and b0 is the lowest bit of the column that the
    # product sees.
    k = k.reshape([KEYS, 4, 2, 2, 2, 2, 2]).permute((2, 3, 6, 5, 1, 4, 0))
    k = gl.convert_layout(k.reshape([STORED_COLUMNS, KEYS]), _RIGHT, assert_trivial=True)
    scores = mma_v2(
        operand, k, gl.full([ROWS, KEYS], 0.0, gl.float32, layout=STORED_PRODUCTS),
    )
    scales = ring.k_scales.index(slot).load(gl.SliceLayout(0, STORED_PRODUCTS))
    # An infinite scale would make a pair dead whose product is negative, so it becomes NaN.
    scales = gl.fma(scales, 0.0, scales)
    return scores * gl.expand_dims(power, 1) * gl.expand_dims(scales, 0)


@gluon.jit
def keys_of_threads(x, AXIS: gl.constexpr):
    """Return x with its keys, which are axis AXIS, in an order in which each thread's weights are
    the registers of one operand: other warps load them as one vector, without moves."""
    KEYS: gl.constexpr = x.shape[AXIS]
    OTHER: gl.constexpr = x.shape[1 - AXIS]
    if AXIS == 0:
        found = x.reshape([KEYS // 32, 4, 8, OTHER]).permute((1, 0, 2, 3)).reshape([KEYS, OTHER])
    else:
        found = x.reshape([OTHER, KEYS // 32, 4, 8]).permute((0, 2, 1, 3)).reshape([OTHER, KEYS])
    return found


@gluon.jit
def stored_products(weights, alpha, acc, top, ring, slot, keys, STORED: gl.constexpr):
    """Return (acc, top) after a slot's values: the accumulator relative to the largest scale of
    values so far, and that scale.

    Args:
        alpha: factor of the earlier accumulator. keys: number of the slot's keys.
    """
    KEYS: gl.constexpr = ring.v_bufs.shape[3]
    # Each warp has all scales, so that their maximum needs no barrier.
    ALL: gl.constexpr = gl.BlockedLayout([KEYS // 32], [32], [4], [0])
    new_top = gl.maximum(top, gl.max(gl.abs(ring.v_scales.index(slot).load(ALL)), 0))
    inverse = 1.0 / new_top
    acc = acc * gl.expand_dims(alpha * (top * inverse), 1)
    scales = ring.v_scales.index(slot).load(gl.SliceLayout(0, STORED_PRODUCTS)) * inverse
    halves = keys_of_threads((weights * gl.expand_dims(scales, 0)).to(gl.float16), 1)
    words = words_of(ring.v_bufs, slot, _VALUE_WORDS)
    if STORED != "int8":
        # Rows behind a sequence's keys may be NaN, and 0 * NaN is NaN.
        rows = gl.expand_dims(gl.arange(0, KEYS, layout=gl.SliceLayout(1, _VALUE_WORDS)), 1)
        words = gl.where(rows < keys, words, 0)
    # The numbers of one place in their words are beside each other.
    v = converted(words, STORED, _INTERLEAVED).permute((0, 3, 2, 1))
    v = keys_of_threads(v.reshape([KEYS, STORED_COLUMNS]), 0)
    v = gl.convert_layout(v, _RIGHT, assert_trivial=True)
    return mma_v2(gl.convert_layout(halves, _LEFT), v, acc), new_top


@gluon.jit
def natural_columns(acc):
    """Return the accumulator of `stored_products` with its columns in the order of values'."""
    ROWS: gl.constexpr = acc.shape[0]
    acc = acc.reshape([ROWS, 4, STORED_COLUMNS // 4]).permute((0, 2, 1))
    return gl.convert_layout(acc.reshape([ROWS, STORED_COLUMNS]), STORED_PRODUCTS)


@gluon.jit
def scale_pointers(scales, places, kv_head, keys, PAGE: gl.constexpr):
    """Return pointers to the scales of a sequence's keys.

    Args:
        scales: (pointer, strides of page, head and row). places: `packed_steps.KeyPlaces`.
    """
    at = scales[0] + gl.cast(kv_head, gl.int64) * scales[2]
    if PAGE == 0:
        row = places.first_row + keys
    else:
        at = at + page_at(places, keys, PAGE).to(gl.int64) * scales[1]
        row = keys % PAGE
    return at + row.to(gl.int64) * scales[3]


@gluon.jit
def load_step_scales(k_scale, v_scale, ring, slot, unit, first, kind, PAGE: gl.constexpr):
    """Copy a step's scales into a slot, from one warp; 0 behind a sequence's keys. Its threads
    arrive at the barrier of keys when their copies are there.

    Args:
        k_scale, v_scale: as in `scale_pointers`.
        unit: `decode_parts.Unit`. first, kind: from `hopper_decode.step_of`.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [LOADING_THREADS], [1], [0])
    keys = first + gl.arange(0, ring.k_bufs.shape[3], layout=LANES)
    there = keys < first + kind // 2
    for_keys = scale_pointers(k_scale, unit.keys, unit.kv_head, keys, PAGE)
    _copy(ring.k_scales.index(slot), for_keys, mask=there)
    for_values = scale_pointers(v_scale, unit.keys, unit.kv_head, keys, PAGE)
    _copy(ring.v_scales.index(slot), for_values, mask=there)
    async_copy.mbarrier_arrive(ring.k_full.index(slot), increment_count=False)
