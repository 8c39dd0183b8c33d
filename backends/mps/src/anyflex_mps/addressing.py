"""Bounds of the integers that kernels compute with: sizes, and offsets inside of a head."""

from __future__ import annotations

from torch import Tensor

__all__ = ["fits_int"]


def fits_int(tensor: Tensor) -> bool:
    """Return whether the offset of every element of a head fits int.

    Args:
        tensor: [B, H, rows, columns]; kernels add a head's own offset as long.
    """
    (rows, columns), (row, column) = tensor.shape[2:], tensor.stride()[2:]
    return (rows - 1) * row + (columns - 1) * column < 1 << 31
