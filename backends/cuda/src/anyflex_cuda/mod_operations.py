"""Operations that a mod's text calls in Gluon instead of `triton.language` and the portable
`operations`. Layouts are part of Gluon's types, so a scalar can't be broadcast without one."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anyflex_cuda.split_tiles import ROWS, layout_of_products
from anyflex_triton.device_functions import operations as ops

__all__ = [
    "accumulate",
    "add_dense",
    "along",
    "along_chunks",
    "along_dense",
    "along_distances",
    "along_periods",
    "dense_rows",
    "distant_keys",
    "fast_tanh_capped",
    "full",
    "key_beside",
    "keys_of",
    "load_dense",
    "load_once",
    "rows_of",
    "spread",
    "tanh_capped",
]


@gluon.jit
def full(shape, value, dtype: gl.constexpr):
    """Return a scalar: `shape` is ()."""
    gl.static_assert(len(shape) == 0)
    return gl.full((), value, dtype)


@gluon.jit
def spread(x, score):
    """Return x as float32 in the shape of the score."""
    if x.type.is_block():
        return tl.broadcast_to(tl.cast(x, tl.float32), score.shape)
    else:
        return gl.full(score.shape, tl.cast(x, tl.float32), gl.float32, score.type.layout)


@gluon.jit
def load_once(pointers, inside):
    """Load, with 0 where not inside. The portable function makes copies of a row so that Triton
    can choose a layout; here the layout is given."""
    return tl.load(pointers, mask=inside, other=0)


@gluon.jit
def accumulate(totals, LEARNED: gl.constexpr, offset, inside, value, live, SUMS: gl.constexpr):
    """Do what the portable function does. Where offset is the same along an axis, that axis is
    summed first: in a layout for products a thread has several copies of an element of a tensor
    [1, N], and Triton 3.6 adds each of them (2 and 16 times the right sum, on an H100). Vectors
    have one copy.

    Backward leaves sums that rows decide, alone or with keys, to the portable pass; but every mod
    has to compile."""
    gl.static_assert(SUMS == "floats", "the others are the portable pass's")
    if len(offset.shape) == 0 or min(offset.shape[0], offset.shape[1]) > 1:
        ops.accumulate(totals, LEARNED, offset, inside, value, live, SUMS)
    else:
        AXIS: gl.constexpr = 0 if offset.shape[0] == 1 else 1
        total = gl.sum(gl.where(live, value, 0.0), AXIS)
        # Adding 0 can be skipped; NaN compares unequal to 0 and is added.
        kept = (total != 0.0) & inside
        gl.atomic_add(totals[LEARNED] + gl.max(offset, AXIS), total, mask=kept, sem="relaxed")


@gluon.jit
def along(x, index):
    """Return values [R] of rows or columns, in any layout, in the shape and layout of `index`,
    which is [R, 1] or [1, R]. Other values, such as scalars, are returned unchanged."""
    if len(x.shape) != 1:
        return x
    elif index.shape[0] == 1:
        return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(0, index.type.layout)), 0)
    else:
        return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, index.type.layout)), 1)


@gluon.jit
def tanh_capped(x, number, cap, COARSE: tl.constexpr):
    """Do what the portable function does, with the device's approximate reciprocal: one
    multiplication less per score."""
    if COARSE:
        total = tl.exp2(x * (number * 2.8853900817779268)) + 1.0
        inverse = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [total], dtype=gl.float32, is_pure=True, pack=1
        )
        return cap - (2.0 * cap) * inverse
    else:
        return cap * ops.tanh(number * x)


@gluon.jit
def fast_tanh_capped(x, number, cap, COARSE: tl.constexpr):
    """Cap by the device's tanh instruction, with error 2^-11: one slow instruction instead of two.
    Caps that are too large for COARSE get the exact tanh."""
    if COARSE:
        of = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [number * x], dtype=gl.float32, is_pure=True, pack=1
        )
        return cap * of
    else:
        return cap * ops.tanh(number * x)


# Values by pairs: see `anyflex_triton.pair_reads`. Scores are a consumer's, [ROWS, BLOCK_N].


@gluon.jit
def distant_keys(first_kv, BLOCK_N: gl.constexpr):
    """Return [2 * BLOCK_N] keys, which are as far from a tile's first row as its pairs are in a
    step from first_kv on: the last row's first pair comes first. The last keys are equal."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    places = gl.minimum(gl.arange(0, 2 * BLOCK_N, layout=LAYOUT), ROWS + BLOCK_N - 2)
    return places + (first_kv - (ROWS - 1))


@gluon.jit
def along_distances(x, score):
    """Return each pair's value, float32, given values of `distant_keys`."""
    LAYOUT: gl.constexpr = score.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, score.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    places = gl.expand_dims(columns, 0) - gl.expand_dims(rows, 1) + (ROWS - 1)
    found = gl.gather(x, places.reshape([ROWS * score.shape[1]]), 0).reshape(score.shape)
    return tl.cast(gl.convert_layout(found, LAYOUT, assert_trivial=True), tl.float32)


@gluon.jit
def key_beside(q_idx, key):
    """Return a key, [1, 1] in the layout of q_idx."""
    return gl.full([1, 1], key, gl.int32, q_idx.type.layout)


@gluon.jit
def along_chunks(values, KEYS: gl.constexpr, score):
    """Return each pair's value, float32, given [ROWS, 1] for each KEYS columns."""
    columns = gl.arange(0, score.shape[1], layout=gl.SliceLayout(0, score.type.layout))
    columns = gl.expand_dims(columns, 0)
    found = tl.broadcast_to(values[0], score.shape)
    for i in gl.static_range(1, len(values)):
        # The compiler knows these columns, so the comparison costs nothing.
        found = gl.where(columns < i * KEYS, found, values[i])
    return tl.cast(found, tl.float32)


@gluon.jit
def rows_of(q_idx, KEYS: gl.constexpr):
    """Return q_idx in the layout of KEYS columns of scores."""
    return gl.convert_layout(q_idx, layout_of_products(KEYS))


@gluon.jit
def keys_of(KEYS: gl.constexpr):
    """Return a period's keys, [1, KEYS], in the layout of `rows_of`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(0, layout_of_products(KEYS))
    return gl.expand_dims(gl.arange(0, KEYS, layout=LAYOUT), 0)


@gluon.jit
def along_periods(x, score):
    """Return each pair's value, float32, given one period's, [ROWS, KEYS]."""
    KEYS: gl.constexpr = x.shape[1]
    N: gl.constexpr = score.shape[1]
    found = tl.broadcast_to(x.reshape([ROWS, 1, KEYS]), (ROWS, N // KEYS, KEYS))
    found = found.reshape([ROWS, N])
    found = gl.convert_layout(found, score.type.layout, assert_trivial=True)
    return tl.cast(found, tl.float32)


@triton.constexpr_function
def layout_of_words(columns, size):
    """Return a layout [ROWS, columns] whose threads have words of 16 bytes, of elements of `size`
    bytes. Each has elements of the two rows of which it has scores, so that values move between
    the four threads of these rows alone."""
    wide = 16 // size
    registers = [[0, 1 << i] for i in range(wide.bit_length() - 1)]
    registers += [
        [0, 1 << i] for i in range((4 * wide).bit_length() - 1, columns.bit_length() - 1)
    ]
    lanes = [[0, wide], [0, 2 * wide], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=[*registers, [8, 0]], lane_bases=lanes, warp_bases=[[16, 0], [32, 0]],
        block_bases=[], shape=[ROWS.value, columns],
    )  # fmt: skip


@triton.constexpr_function
def layout_of_columns(keys, rows, size):
    """Return a layout [keys, rows] of such words, of a product's transposed scores. A warp has
    words of the keys of which it has scores."""
    wide = 16 // size
    registers = [[1 << i, 0] for i in range(wide.bit_length() - 1)]
    lanes = [[1 << i, 0] for i in range(wide.bit_length() - 1, 4)]
    places = [[0, 1 << i] for i in range(rows.bit_length() - 1)]
    count = 5 - len(lanes)
    return gl.DistributedLinearLayout(
        reg_bases=registers + places[count:], lane_bases=lanes + places[:count],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[keys, rows],
    )  # fmt: skip


@gluon.jit
def dense_rows(q_idx, SIZE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return q_idx, [ROWS, 1] or [1, rows], in the layout in which `load_dense` loads elements of
    SIZE bytes."""
    if q_idx.shape[1] == 1:
        return gl.convert_layout(q_idx, layout_of_words(BLOCK_N, SIZE), assert_trivial=True)
    else:
        return gl.convert_layout(q_idx, layout_of_columns(BLOCK_N, q_idx.shape[1], SIZE))


@gluon.jit
def load_dense(
    pointers, first_kv, length, SIZE: gl.constexpr, BLOCK_N: gl.constexpr, WHOLE: gl.constexpr
):
    """Return [ROWS, BLOCK_N] elements of rows of this length, from first_kv on; 0 after their end.

    Args:
        pointers: to rows, [ROWS, 1], or to [1, rows], and then [BLOCK_N, rows] is returned. Rows,
            their length and first_kv are multiples of 16 bytes.
        WHOLE: whether no element is after the end.
    """
    WIDE: gl.constexpr = 16 // SIZE
    # Multiplications tell the compiler what is a multiple.
    first_kv = first_kv // WIDE * WIDE
    if pointers.shape[1] == 1:
        LAYOUT: gl.constexpr = gl.SliceLayout(0, layout_of_words(BLOCK_N, SIZE))
        keys = gl.expand_dims(gl.arange(0, BLOCK_N, layout=LAYOUT), 0)
        at = gl.multiple_of(pointers + first_kv + keys, [1, 16])
    else:
        OF_KEYS: gl.constexpr = gl.SliceLayout(
            1, layout_of_columns(BLOCK_N, pointers.shape[1], SIZE)
        )
        keys = gl.expand_dims(gl.arange(0, BLOCK_N, layout=OF_KEYS), 1)
        at = gl.multiple_of(pointers + first_kv + keys, [16, 1])
    if WHOLE:
        return gl.load(at)
    else:
        left = gl.cast(length, gl.int32) - first_kv
        return gl.load(at, mask=keys // WIDE * WIDE < left, other=0.0)


@gluon.jit
def along_dense(x, score):
    """Return each pair's value, float32, given those of `load_dense`."""
    return tl.cast(gl.convert_layout(x, score.type.layout), tl.float32)


@gluon.jit
def add_dense(rows, first_kv, length, value, live, BLOCK_N: gl.constexpr):
    """Add values [BLOCK_N, rows] of live pairs to rows of this length, from first_kv on, by atomic
    additions of 16 bytes.

    Args:
        rows: pointers to float32, [1, rows], as `load_dense` takes them.
    """
    LAYOUT: gl.constexpr = layout_of_columns(BLOCK_N, rows.shape[1], 4)
    first_kv = first_kv // 4 * 4
    keys = gl.expand_dims(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT)), 1)
    at = gl.multiple_of(rows + first_kv + keys, [16, 1])
    value = gl.convert_layout(gl.where(live, value, 0.0), LAYOUT)
    left = gl.cast(length, gl.int32) - first_kv
    gl.atomic_add(at, value, mask=keys // 4 * 4 < left, sem="relaxed")
