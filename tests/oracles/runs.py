"""Block masks computed from a dense mask, without any builder of the project."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FULL", "PARTIAL", "dense_to_runs"]

FULL, PARTIAL = 1, 2


def dense_to_runs(live: Tensor, block_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """offsets int32 [B', H', Qb + 1] and runs int32 [n, 3] of a dense mask [B', H', L, S]."""
    batch, heads, q_length, kv_length = live.shape
    q_block, kv_block = block_size
    rows, columns = -(-q_length // q_block), -(-kv_length // kv_block)
    offsets = torch.zeros((batch, heads, rows + 1), dtype=torch.int32)
    runs: list[tuple[int, int, int]] = []
    for b in range(batch):
        for h in range(heads):
            offsets[b, h, 0] = len(runs)
            for row in range(rows):
                band = live[b, h, row * q_block : (row + 1) * q_block]
                kinds = [
                    _kind(band[:, column * kv_block : (column + 1) * kv_block])
                    for column in range(columns)
                ]
                for column, kind in enumerate(kinds):
                    if not kind:
                        continue
                    if column and kinds[column - 1] == kind:
                        runs[-1] = (runs[-1][0], column + 1, kind)
                    else:
                        runs.append((column, column + 1, kind))
                offsets[b, h, row + 1] = len(runs)
    return offsets, torch.tensor(runs, dtype=torch.int32).reshape(-1, 3)


def _kind(block: Tensor) -> int:
    return FULL if block.all() else PARTIAL if block.any() else 0
