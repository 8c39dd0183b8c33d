"""Arguments of kernels: type names, strides in units that keep alignment, and descriptors."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = [
    "BLOCK_BYTES",
    "BYTES",
    "LEAST_COPIED",
    "Boxes",
    "Heads",
    "Layout",
    "Part",
    "Types",
    "alignment_of",
    "descriptor_of",
    "descriptor_of_floats",
    "enter_device",
    "heads_described",
    "is_blocked",
    "is_described_whole",
    "layout_like",
    "layout_of",
    "make_context",
    "pointer_type",
    "without_bools",
]

Types = str | tuple[str, ...]
"""Type of one argument: Triton's name of it (``"*bf16"``, ``"i32"``), or a tuple of names."""

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}

BYTES = 16
"""Maximum bytes that one thread loads at a time, at an address that is a multiple of them."""
LEAST_COPIED = 4
"""Bytes of NVIDIA's smallest asynchronous copy."""
BLOCK_BYTES = 64
"""Bytes for Intel's 2D block loads: minimum of a row and of the row stride, and alignment of the
base. Row stride, length and width have 24 bits."""
_KEPT = 4096
"""Size of the layout caches, in shapes with strides: calls ask for the same few again and
again."""


Heads = Literal["stacked", "beside"]
"""Layout of heads: one after the other, or side by side within a row, as models project them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor [B, H, rows, columns].

    Args:
        strides: all but the last are counted in `unit` elements.
        unit: number of elements in `alignment` bytes.
        alignment: bytes; the largest of 16, 8, 4 and the size of an element that divides the
            pointer and all strides. Asynchronous copies take at least 4.
        scattered: the last stride isn't 1.
    """

    strides: tuple[int, int, int, int]
    unit: int
    alignment: int
    scattered: bool


class Part(NamedTuple):
    """A contiguous tensor within another one of a call's values, which is bytes.

    Making such a view takes the host as long as allocating a tensor, and the launcher in C needs
    none.

    Args:
        of: name of the value.
        begin: position of the first byte.
    """

    of: str
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def within(self, memory: Tensor) -> Tensor:
        """Return the tensor, a view of the value's memory."""
        end = self.begin + math.prod(self.shape) * self.dtype.itemsize
        return memory[self.begin : end].view(self.dtype).view(self.shape)


def pointer_type(dtype: torch.dtype) -> str:
    """Return Triton's name of a pointer to elements of `dtype`; a bool is read as a byte."""
    return _POINTERS[dtype]


def without_bools(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return views of the same memory that read a bool as a byte."""
    return tuple(
        [tensor.view(torch.int8) if tensor.dtype is torch.bool else tensor for tensor in tensors]
    )


def alignment_of(tensor: Tensor) -> int:
    """Return the largest of 64 and the powers of two up to 16 that divides a tensor's address.
    `layout_of`, `is_blocked` and the like follow from it, shape, strides and type."""
    address = tensor.data_ptr()
    return math.gcd(address, BYTES) if address % BLOCK_BYTES else BLOCK_BYTES


def layout_of(tensor: Tensor) -> Layout:
    """Return the layout of a 4-D tensor."""
    return layout_like(
        tensor.shape, tensor.stride(), tensor.element_size(), math.gcd(tensor.data_ptr(), BYTES)
    )


@lru_cache(_KEPT)
def layout_like(
    sizes: tuple[int, ...], strides: tuple[int, ...], size: int, alignment: int
) -> Layout:
    """Return the `layout_of` a tensor with this shape and these strides.

    Args:
        size: bytes of an element.
        alignment: a power of two, up to 16: bytes of which its pointer is a multiple.
    """
    b, h, row, column = strides
    # The stride of a dimension of one element is never used, and may be anything.
    if sizes[0] <= 1:
        b = 0
    if sizes[1] <= 1:
        h = 0
    if sizes[2] <= 1:
        row = 0
    if sizes[3] > 1 and column != 1:
        return Layout((b, h, row, column), 1, size, True)
    alignment = math.gcd(alignment, b * size, h * size, row * size)
    if alignment < max(LEAST_COPIED, size):
        alignment = size
    unit = alignment // size
    return Layout((b // unit, h // unit, row // unit, 1), unit, alignment, False)


def heads_described(tensor: Tensor) -> Heads | None:
    """Return how heads lie in a descriptor that covers all rows of all heads, whose strides are
    multiples of 16 bytes; None where no descriptor covers them."""
    batch, heads, rows, dims = tensor.shape
    b, h, row, column = tensor.stride()
    size = tensor.element_size()
    if (
        tensor.data_ptr() % BYTES
        or (dims > 1 and column != 1)
        or row % (BYTES // size)
        or row < dims
    ):
        return None
    if not 0 < batch * heads * rows < 1 << 31 or row * size >= 1 << 40:
        return None
    if (heads == 1 or h == rows * row) and (batch == 1 or b == heads * rows * row):
        return "stacked"
    columns = (heads - 1) * h + dims
    if h % (BYTES // size) or columns > row or columns >= 1 << 31:
        return None
    return "beside" if batch == 1 or b == rows * row else None


class Boxes(TensorDescriptor):  # type: ignore[misc]
    """Tensor descriptor whose boxes kernels load and store. Triton's own class repeats at each
    launch checks that were made before it.

    Args:
        base: the tensor.
        shape, strides: in elements.
        block_shape: a box.
    """

    mode = "tiled"

    def __init__(
        self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int]
    ) -> None:
        self.base = base
        self.shape = shape
        self.strides = strides
        self.block_shape = block_shape


def descriptor_of(tensor: Tensor, rows: int, dims: int) -> Boxes:
    """Return a descriptor of a tensor's rows, laid out as `heads_described` says and loaded `rows`
    at a time. Columns past the head dim load as 0; where heads lie beside each other, only columns
    past the last head do."""
    batch, heads, length, columns = tensor.shape
    lines = batch * length
    if heads_described(tensor) == "beside":
        columns += (heads - 1) * tensor.stride(1)
    else:
        lines *= heads
    return Boxes(tensor, [lines, columns], [tensor.stride(2), 1], [rows, dims])


def is_blocked(tensor: Tensor) -> bool:
    """Whether Intel GPUs can load any head's rows in 2D blocks, by a descriptor that a kernel
    makes for that head. Intel's compiler can't see these numbers, and kernels don't check them."""
    batch, heads, rows, dims = tensor.shape
    size = tensor.element_size()
    b, h, row, column = (stride * size for stride in tensor.stride())
    bases = (tensor.data_ptr(), b * (batch > 1), h * (heads > 1))
    return (
        column == size
        and all(base % BLOCK_BYTES == 0 for base in bases)
        and row % BYTES == 0
        and BLOCK_BYTES <= dims * size <= row < 1 << 24
        and 1 < rows < 1 << 24
    )


def is_described_whole(tensor: Tensor) -> bool:
    """Whether a descriptor covers all elements of a contiguous tensor."""
    return tensor.data_ptr() % BYTES == 0 and 0 < tensor.numel() < 1 << 31


def descriptor_of_floats(tensor: Tensor, count: int) -> Boxes:
    """Return a descriptor of all elements of a tensor that `is_described_whole`, loaded `count` at
    a time."""
    return Boxes(tensor, [tensor.numel()], [1], [count])


def make_context(device: torch.device) -> None:
    """Give this thread a context on the device, whether it has had one or not."""
    # mem_get_info is the cheapest call of the runtime that makes a context.
    torch.cuda.mem_get_info(device)


_entered = threading.local()


def enter_device(device: torch.device) -> None:
    """Give this thread a context on the device: encoding a descriptor needs one, and neither torch
    nor Triton has made one before a thread's first launch."""
    if device.type != "cuda" or device.index in getattr(_entered, "devices", ()):
        return
    make_context(device)
    _entered.devices = {*getattr(_entered, "devices", ()), device.index}
