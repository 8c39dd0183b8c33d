"""Query, key and value as the fuzzer lays them out in memory, also with NaN and infinity."""

from __future__ import annotations

import functools
import mmap
import random
import sys

import torch
from torch import Tensor

__all__ = ["laid_out", "with_nonfinite"]

FAR_BYTES = 24 << 30
NO_RESERVE = 0x4000  # MAP_NORESERVE, which mmap names since Python 3.11
LAYOUTS = (
    "contiguous",
    "transposed",
    "expanded batch",
    "expanded heads",
    "expanded length",
    "every second",
    "column",
    "aligned to nothing",
    "overlapping",
    "far apart",
)


def laid_out(draw: random.Random, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """Random values [B, H, L, E] in some layout."""
    batch, heads, length, dim = shape
    values = torch.randn(shape).to(dtype)
    layout = draw.choice(LAYOUTS) if draw.random() < 0.5 else "contiguous"
    # Further heads would lie in the next batch.
    if layout == "far apart" and (sys.platform != "linux" or heads > 8):
        layout = "contiguous"
    if layout == "transposed":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "expanded batch":
        return values[:1].expand(shape)
    if layout == "expanded heads":
        return values[:, :1].expand(shape)
    if layout == "expanded length":
        return values[:, :, :1].expand(shape)
    if layout == "every second":
        return values.repeat_interleave(2, -1)[..., ::2]
    if layout == "column":
        return values.mT.contiguous().mT
    if layout == "aligned to nothing":
        memory = torch.empty(values.numel() + 1, dtype=dtype)
        return memory[1:].view(shape).copy_(values)
    if layout == "overlapping":
        # Each row begins at the second element of the row before it.
        memory = torch.randn(batch * heads * length + dim).to(dtype)
        return memory.as_strided(shape, (heads * length, length, 1, 1))
    if layout == "far apart" and values.numel():
        size = dtype.itemsize
        strides = ((8 << 30) // size, (1 << 30) // size, 4096 // size, 1)
        # One row per page; batches are further apart than 32 bits of elements reach.
        far = far_memory().view(dtype).as_strided(shape, strides)
        return far.copy_(values)
    return values


@functools.cache
def far_memory() -> Tensor:
    """Address space that takes physical memory only where it is written to."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, FAR_BYTES, flags=flags), dtype=torch.uint8)


def with_nonfinite(draw: random.Random, tensor: Tensor) -> Tensor:
    """A copy with NaN and infinity in up to three rows."""
    copy = tensor.clone()
    batch, heads, length, dim = tensor.shape
    for _ in range(draw.randint(1, 3)):
        if tensor.numel():
            at = (draw.randrange(batch), draw.randrange(heads), draw.randrange(length))
            copy[at][draw.randrange(dim)] = draw.choice([torch.nan, torch.inf, -torch.inf])
    return copy
