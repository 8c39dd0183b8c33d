"""What the text of a mod calls in Gluon instead of `triton.language` and of the portable
`operations`: where layouts are part of a type, a scalar isn't broadcast without one."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from anyflex_triton.device_functions import operations as ops

__all__ = [
    "accumulate",
    "along",
    "fast_tanh_capped",
    "full",
    "load_once",
    "spread",
    "tanh_capped",
]


@gluon.jit
def full(shape, value, dtype: gl.constexpr):
    """A scalar: `shape` is ()."""
    gl.static_assert(len(shape) == 0)
    return gl.full((), value, dtype)


@gluon.jit
def spread(x, score):
    """float32 in the shape of the score."""
    if x.type.is_block():
        return tl.broadcast_to(tl.cast(x, tl.float32), score.shape)
    else:
        return gl.full(score.shape, tl.cast(x, tl.float32), gl.float32, score.type.layout)


@gluon.jit
def load_once(pointers, inside):
    """What lies there, 0 where not inside. The portable one makes copies of a row, for the sake of
    a layout that Triton then chooses; here that is given."""
    return tl.load(pointers, mask=inside, other=0)


@gluon.jit
def accumulate(totals, LEARNED: gl.constexpr, offset, inside, value, live, SUMS: gl.constexpr):
    """The portable one. Where offset is the same along an axis it loses that axis: of a tensor
    [1, N] in a layout that is made for products a thread has several copies of an element, and
    Triton 3.6 adds each of them (2 and 16 times what is right, on an H100). Of vectors it has
    one.

    Backward leaves what rows decide, alone or with keys, to the portable pass: of mods, whatever
    they read, all compiles."""
    gl.static_assert(SUMS == "floats", "the others are the portable pass's")
    if len(offset.shape) == 0 or min(offset.shape[0], offset.shape[1]) > 1:
        ops.accumulate(totals, LEARNED, offset, inside, value, live, SUMS)
    else:
        AXIS: gl.constexpr = 0 if offset.shape[0] == 1 else 1
        total = gl.sum(gl.where(live, value, 0.0), AXIS)
        # A zero adds nothing; NaN is not 0.
        kept = (total != 0.0) & inside
        gl.atomic_add(totals[LEARNED] + gl.max(offset, AXIS), total, mask=kept, sem="relaxed")


@gluon.jit
def along(x, index):
    """Values [R] of rows or columns, which lie in any layout, as `index` has them, which is [R, 1]
    or [1, R]. Others, as scalars, stay as they are."""
    if len(x.shape) != 1:
        return x
    elif index.shape[0] == 1:
        return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(0, index.type.layout)), 0)
    else:
        return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, index.type.layout)), 1)


@gluon.jit
def tanh_capped(x, number, cap, COARSE: tl.constexpr):
    """The portable one, with the device's reciprocal: a multiplication less for every score."""
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
    """The device's own instruction, 2^-11 off: one slow instruction instead of two. Not for caps
    that are too large for the coarse one."""
    if COARSE:
        of = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [number * x], dtype=gl.float32, is_pure=True, pack=1
        )
        return cap * of
    else:
        return cap * ops.tanh(number * x)
