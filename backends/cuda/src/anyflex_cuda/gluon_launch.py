"""Compilation and launch of kernels in Gluon, and the descriptors that TMA loads tiles by."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from anyflex_triton.building import BYTES, Boxes, Program, TellsFrontEnd, pointer_type

__all__ = [
    "GluonProgram",
    "boxes_of",
    "descriptor",
    "descriptor_type",
    "has_boxes",
    "is_aligned",
    "is_boxed",
    "row_descriptor",
    "strides_of",
]

_TYPES = {
    torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32,
    torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv,
}  # fmt: skip


class GluonSource(TellsFrontEnd, GluonASTSource):  # type: ignore[misc]
    """Source of a kernel in Gluon, as ``triton.compile`` takes it."""


class GluonProgram(Program):
    """A `Program` whose kernel is made by ``gluon.jit``."""

    source_type = GluonSource

    @staticmethod
    def box_type(boxes: Boxes) -> str:
        """Return `descriptor_type`."""
        return descriptor_type(boxes.base.dtype, tuple(boxes.block_shape))


@lru_cache
def descriptor_type(dtype: torch.dtype, box: tuple[int, ...]) -> str:
    """Return Triton's name of the type of a `descriptor`, for `Program`'s types.

    Args:
        dtype: type of the tensor's elements.
        box: sizes of what one load or store moves.
    """
    shape = ", ".join(map(str, box))
    if len(box) == 2:  # of a `row_descriptor`
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    else:
        layout = gl.NVMMASharedLayout.get_default_for(list(box), _TYPES[dtype])
    return f"tensordesc<{pointer_type(dtype)[1:]}[{shape}],{layout!r}>"


def descriptor(tensor: Tensor, box: tuple[int, ...]) -> Boxes:
    """Return a descriptor of a tensor that `is_boxed`. Loads give 0 outside of it; stores there
    are dropped."""
    return Boxes(tensor, *boxes_of(tensor.shape, tensor.stride(), tensor.element_size(), box))


def row_descriptor(row_values: Tensor, count: int) -> Boxes:
    """Return a descriptor of float32 rows, along the last dimension, that moves `count` numbers of
    a row."""
    length = row_values.shape[-1]
    rows = row_values.numel() // length
    return Boxes(row_values, [rows, length], [length, 1], [1, count])


@lru_cache(4096)
def boxes_of(
    shape: tuple[int, ...], strides: tuple[int, ...], size: int, box: tuple[int, ...]
) -> tuple[list[int], list[int], list[int]]:
    """Return the arguments of `Boxes` after the base. The lists are cached and must not be written
    to.

    Args:
        shape, strides: of a tensor, in elements of `size` bytes.
    """
    return list(shape), list(strides_of(shape, strides, size)), list(box)


def is_boxed(tensor: Tensor) -> bool:
    """Return whether TMA can load and store boxes of a tensor: its last dimension is contiguous,
    its base and its other strides are multiples of 16 bytes, and none is 0."""
    return is_aligned(tensor.data_ptr()) and has_boxes(
        tensor.shape, tensor.stride(), tensor.element_size()
    )


def is_aligned(pointers: int) -> bool:
    """Return whether `is_boxed` accepts a base pointer, or several combined by bitwise or."""
    return pointers % BYTES == 0


@lru_cache(4096)
def has_boxes(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> bool:
    """Return whether `is_boxed` accepts shape and strides.

    Args:
        shape, strides: of a tensor, in elements of `size` bytes.
    """
    if not 0 < min(shape) <= max(shape) < 1 << 31 or (shape[-1] > 1 and strides[-1] != 1):
        return False
    outer = strides_of(shape, strides, size)[:-1]
    return min(outer) > 0 and max(outer) * size < 1 << 40 and math.gcd(*outer) * size % BYTES == 0


@lru_cache(4096)
def strides_of(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return a tensor's strides, in elements. The stride of a dimension of size 1 is arbitrary; it
    is replaced by a contiguous tensor's, rounded up."""
    found = [1] * len(shape)
    span = 1
    for axis in reversed(range(len(shape))):
        last = axis == len(shape) - 1
        if shape[axis] > 1:
            found[axis] = strides[axis]
        elif not last:
            found[axis] = span
        span = max(span, found[axis] * shape[axis])
        if last:
            span = -(-span * size // BYTES) * BYTES // size
    return tuple(found)
