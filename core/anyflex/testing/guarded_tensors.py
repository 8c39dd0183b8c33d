"""Guarded tensors: memory between two stretches of a pattern, which also fills the tensor.

The pattern is a NaN of every floating type that no arithmetic makes (all bits set would be one
that vectorised conversions and exponentials do make). Where a kernel leaves it inside, the element
was not written; where a kernel changes it outside, it wrote past the end.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

__all__ = ["Guarded", "raw_bytes", "same_bytes"]

_GUARD_BYTES = 4096


def _pattern(width: int) -> list[int]:
    """Bytes of one element: 0xFFF5 and then 0xA5 from the most significant byte on."""
    if width == 1:
        return [0xFF]
    significant = [0xFF, 0xF5] + [0xA5] * (width - 2)
    return significant if sys.byteorder == "big" else significant[::-1]


class Guarded:
    """A tensor with the shape, strides and type of another, in guarded memory.

    Args:
        like: dense; its values are not read.
        poison: fill the tensor with the pattern; else with zeros.

    Attributes:
        tensor: what a kernel is given.
    """

    def __init__(self, like: Tensor, *, poison: bool = True) -> None:
        size = like.element_size()
        self._guard = _GUARD_BYTES // size
        self._count = like.numel()
        self._memory = torch.empty(
            self._count + 2 * self._guard, dtype=like.dtype, device=like.device
        )
        self._pattern = torch.tensor(_pattern(size), dtype=torch.uint8, device=like.device)
        self._memory.view(torch.uint8).view(-1, size).copy_(self._pattern)
        self._layout = (like.shape, like.stride(), self._guard)
        self.tensor = self._memory.as_strided(*self._layout)
        if not poison:
            self.tensor.zero_()

    def replaced(self) -> str | None:
        """Return how `tensor` was made another tensor than the one that was given, or None."""
        given, found = self._memory.as_strided(*self._layout), self.tensor
        if found.data_ptr() != given.data_ptr() and self._count:
            return "it was given other memory instead of being filled"
        if found.dtype is not given.dtype or found.shape != given.shape:
            return f"it was made {found.dtype} {list(found.shape)}"
        if found.stride() != given.stride():
            return f"its strides were changed from {given.stride()} to {found.stride()}"
        return None

    def content(self) -> Tensor:
        """Return the content of the given memory, whatever became of `tensor`."""
        return self._memory.as_strided(*self._layout)

    def trespass(self) -> str | None:
        """Return where the memory around the tensor was written, or None."""
        end = self._guard + self._count
        for side, guard in (
            ("before", self._memory[: self._guard]),
            ("after", self._memory[end:]),
        ):
            touched = (self._elements(guard) != self._pattern).flatten().nonzero()
            if touched.numel():
                at = int(touched[0]) if side == "after" else _GUARD_BYTES - int(touched[-1])
                return f"{touched.numel()} bytes {side} its end were written, {at} bytes away"
        return None

    def unwritten(self) -> int:
        """Return how many elements still hold the pattern."""
        if not self._count:
            return 0
        return int((self._elements(self.content()) == self._pattern).all(1).sum())

    def _elements(self, tensor: Tensor) -> Tensor:
        return raw_bytes(tensor).view(-1, len(self._pattern))


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's values as bytes, uint8 [numel * element size], in logical order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors hold the same bits: NaN equals itself, -0.0 is not 0.0."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw_bytes(a), raw_bytes(b))
