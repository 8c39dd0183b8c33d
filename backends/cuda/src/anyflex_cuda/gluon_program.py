"""Compiling and launching a kernel in Gluon, and the descriptors that TMA loads its tiles by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anyflex_triton.arguments import enter_device
from anyflex_triton.launch import Program, pointer_type

__all__ = ["GluonProgram", "box_bytes", "descriptor", "descriptor_type", "is_boxed"]

_BYTES = 16
"""What a base and all strides but the last are a multiple of."""
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class GluonProgram(Program):
    """A kernel made by ``gluon.jit`` with its types and constants; else as `Program`."""

    def source(self) -> Any:
        """What ``triton.compile`` takes."""
        portable = super().source()
        return GluonASTSource(
            self.function, portable.signature, dict(self.constants), portable.attrs
        )


def _layout(dtype: torch.dtype, box: tuple[int, ...]) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(box), _TYPES[dtype])


def descriptor_type(dtype: torch.dtype, box: tuple[int, ...]) -> str:
    """Triton's name of the type of a `descriptor`, for `Program`'s types.

    Args:
        dtype: of the tensor's elements.
        box: what one load or store moves: rank and sizes.
    """
    shape = ", ".join(map(str, box))
    return f"tensordesc<{pointer_type(dtype)[1:]}[{shape}],{_layout(dtype, box)!r}>"


def descriptor(tensor: Tensor, box: tuple[int, ...]) -> Any:
    """A descriptor of a tensor that `is_boxed`. Loads give 0 outside of it, stores leave it."""
    enter_device(tensor.device)
    return TensorDescriptor(
        tensor, list(tensor.shape), list(_strides(tensor)), list(box), _layout(tensor.dtype, box)
    )


def is_boxed(tensor: Tensor) -> bool:
    """Whether TMA can load and store boxes of a tensor: its last dimension is contiguous, its
    base and its other strides are multiples of 16 bytes."""
    step = _BYTES // tensor.element_size()
    return (
        tensor.numel() > 0
        and all(size < 1 << 31 for size in tensor.shape)
        and (tensor.shape[-1] == 1 or tensor.stride(-1) == 1)
        and tensor.data_ptr() % _BYTES == 0
        and all(
            stride > 0 and stride % step == 0 and stride * tensor.element_size() < 1 << 40
            for stride in _strides(tensor)[:-1]
        )
    )


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's, in elements. That of a dimension of one element may be anything, and is made
    what a contiguous tensor would have, rounded up; a broadcast dimension's stays 0."""
    strides = [1] * tensor.ndim
    span = 1
    for axis in reversed(range(tensor.ndim)):
        last = axis == tensor.ndim - 1
        if tensor.shape[axis] > 1:
            strides[axis] = tensor.stride(axis)
        elif not last:
            strides[axis] = span
        span = max(span, strides[axis] * tensor.shape[axis])
        if last:
            span = -(-span * tensor.element_size() // _BYTES) * _BYTES // tensor.element_size()
    return tuple(strides)


def box_bytes(dtype: torch.dtype, box: tuple[int, ...]) -> int:
    """What a load of one box announces to its barrier: all of it, the part outside too."""
    return torch.Size(box).numel() * dtype.itemsize
