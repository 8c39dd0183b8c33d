"""Mask mods and small block masks that several tests use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.block_mask.block_mask import BlockMask

__all__ = [
    "by_batch_and_head",
    "causal",
    "int32",
    "lists_mask",
    "runs_mask",
    "untraceable",
]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def by_batch_and_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q + 20 * b >= k + 30 * h


def untraceable(b: Any, h: Any, q: Any, k: Any) -> Any:
    return by_batch_and_head(b, h, q, k) & (torch.special.bessel_j0((q - k).float()) < 2)


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def runs_mask(offsets: list[int], runs: list[tuple[int, int, int]], **more: Any) -> BlockMask:
    """A mask of 2 x 4 blocks of 16."""
    more.setdefault("mask_mod", causal)
    return BlockMask.from_runs(
        int32([[offsets]]), int32(runs).view(-1, 3), seq_lengths=(32, 64), block_size=16, **more
    )


def lists_mask(counts: Any, indices: Any, **more: Any) -> BlockMask:
    """A mask of 2 x 2 blocks of 16 from torch's index lists."""
    more = {"mask_mod": causal, "seq_lengths": (32, 32), **more}
    return BlockMask.from_kv_blocks(int32([[counts]]), int32([[indices]]), BLOCK_SIZE=16, **more)
