"""Tiles of shared memory, and products, in parts whose columns are powers of two.

Tiles of 96 or 192 columns have two parts, the wider one first. Descriptors, buffers and
accumulators are tuples of one or two.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from anyflex_triton.device_functions import nonfinite

__all__ = [
    "ROWS",
    "awaited",
    "buffers",
    "descriptors",
    "layout_of_products",
    "load_box",
    "load_parts",
    "place_parts",
    "products_of_values",
    "reinterpret",
    "store_box",
    "store_parts",
    "zeros_of",
]

# Argument lists would be a line an argument.
# fmt: off

ROWS = gl.constexpr(64)
"""Rows of a consumer, those of one warpgroup's product."""

# Triton 3.8 renames these functions.
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

if hasattr(shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """Another view of shared or tensor memory."""
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)
else:

    @gluon.jit
    def reinterpret(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """Another view of shared or tensor memory; Triton 3.6 has another name for it."""
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)


@triton.constexpr_function
def layout_of_products(columns):
    """Return the layout of a warpgroup's products [ROWS, columns]."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16],
    )


@gluon.jit
def load_parts(descs, bufs, slot, full, b, h, first):
    """Load rows from `first` on into a slot of each part's buffers."""
    for p in gl.static_range(len(bufs)):
        at = [b, h, first, p * bufs[0].shape[4]]
        load_box(descs[p], at, full, bufs[p].index(slot))


@gluon.jit
def product_of_values(weights, v_buf, acc):
    """Issue one part's product with a slot's values."""
    COLUMNS: gl.constexpr = acc.shape[1]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, layout_of_products(COLUMNS), 2)
    weights = gl.convert_layout(weights, OPERAND, assert_trivial=True)
    return warpgroup_mma(weights, v_buf.reshape([v_buf.shape[2], COLUMNS]), acc, is_async=True)


@gluon.jit
def products_of_values(weights, v_bufs, slot, acc):
    """Issue the products of weights and a step's values. Return the accumulators, in flight.

    Args:
        weights: an operand of the first part's products.
    """
    later = acc[:0]
    for p in gl.static_range(len(acc)):
        later = later + (product_of_values(weights, v_bufs[p].index(slot), acc[p]),)
    return later


@gluon.jit
def awaited(later, LEFT: gl.constexpr):
    """Wait until all but the last LEFT products are complete. Return the accumulators of
    `products_of_values`."""
    if len(later) == 1:
        return (warpgroup_mma_wait(num_outstanding=LEFT, deps=later),)
    else:
        return warpgroup_mma_wait(num_outstanding=LEFT, deps=later)


@gluon.jit
def zeros_of(COLUMNS: gl.constexpr):
    """Return a part's zero accumulator."""
    return gl.full([ROWS, COLUMNS], 0.0, gl.float32, layout=layout_of_products(COLUMNS))


@gluon.jit
def place_parts(acc, bufs, ME: gl.constexpr, LOST: gl.constexpr):
    """Store acc, rounded, to shared memory; or (LOST) its rounding residual, which backward's
    delta needs."""
    for p in gl.static_range(len(acc)):
        rounded = acc[p].to(bufs[p].dtype)
        if LOST:
            lost = acc[p] - rounded.to(gl.float32)
            rounded = gl.where(nonfinite(lost), 0.0, lost).to(bufs[p].dtype)
        bufs[p].index(ME).reshape([ROWS, acc[p].shape[1]]).store(rounded)


@gluon.jit
def store_parts(descs, bufs, ME: gl.constexpr, b, h, first_row):
    """Store what `place_parts` wrote to global memory, asynchronously."""
    for p in gl.static_range(len(descs)):
        store_box(descs[p], [b, h, first_row, p * bufs[0].shape[4]], bufs[p].index(ME))


@gluon.jit
def descriptors(first, second):
    """Return a tuple of the descriptors that aren't None."""
    if first is None:
        return ()
    elif second is None:
        return (first,)
    else:
        return (first, second)


@gluon.jit
def buffer(desc, ROOMS: gl.constexpr):
    """Allocate shared memory for ROOMS boxes."""
    SHAPE: gl.constexpr = desc.block_shape
    return gl.allocate_shared_memory(desc.dtype, [ROOMS] + SHAPE, desc.layout)


@gluon.jit
def buffers(descs, ROOMS: gl.constexpr):
    """Call `buffer` for each part."""
    found = descs[:0]
    for p in gl.static_range(len(descs)):
        found = found + (buffer(descs[p], ROOMS),)
    return found
