"""Layout of a call with heads in groups, for the reference's batched products.

Query heads that share a KV head are in one dimension: rows are [B, Hkv, G, L, E] and scores
[B, Hkv, G, L, S] with G = Hq / Hkv. Keys stay [Bkv, Hkv, S, E]: a product folds G, and B where
Bkv is 1, into its rows, so no key is ever copied for another head or batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Layout", "compute_type"]


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """The type of scores, sums and lse: float64 for float64, float32 for all others."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class Layout:
    """Sizes of one call.

    Args:
        query: [B, Hq, L, E].
        key: [Bkv, Hkv, S, E].
    """

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self.batch, self.heads, self.q_length, _ = query.shape
        self.kv_batch, self.kv_heads, self.kv_length, _ = key.shape
        self.group = self.heads // max(1, self.kv_heads)

    def grouped(self, tensor: Tensor) -> Tensor:
        """View [B' , H', ...] as [B', Hkv, G, ...], or as [B', 1, 1, ...] where H' is 1."""
        if tensor.shape[1] == 1 and self.heads != 1:
            return tensor.unsqueeze(2)
        return torch.unflatten(tensor, 1, (self.kv_heads, self.group))

    def ungrouped(self, tensor: Tensor) -> Tensor:
        """[B, Hkv, G, ...] as [B, Hq, ...]."""
        return tensor.flatten(1, 2)

    def fold(self, rows: Tensor) -> Tensor:
        """[B, Hkv, G, R, N] as [Bkv, Hkv, rows, N]; a view where it can be."""
        if self.kv_batch == self.batch:
            return rows.reshape(self.batch, self.kv_heads, -1, rows.shape[-1])
        return rows.transpose(0, 1).reshape(1, self.kv_heads, -1, rows.shape[-1])

    def unfold(self, folded: Tensor) -> Tensor:
        """The opposite of `fold`, always a view."""
        if self.kv_batch == self.batch:
            return torch.unflatten(folded, 2, (self.group, -1))
        return torch.unflatten(folded[0], 1, (self.batch, self.group, -1)).transpose(0, 1)

    def times_keys(self, rows: Tensor, keys: Tensor) -> Tensor:
        """[B, Hkv, G, R, E] times [Bkv, Hkv, C, E], over E: [B, Hkv, G, R, C]."""
        return self.unfold(torch.matmul(self.fold(rows), keys.transpose(-1, -2)))

    def times_values(self, weights: Tensor, values: Tensor) -> Tensor:
        """[B, Hkv, G, R, C] times [Bkv, Hkv, C, E], over C: [B, Hkv, G, R, E]."""
        return self.unfold(torch.matmul(self.fold(weights), values))

    def summed_rows(self, weights: Tensor, rows: Tensor) -> Tensor:
        """[B, Hkv, G, R, C] times [B, Hkv, G, R, E], over R and all that shares a key:
        [Bkv, Hkv, C, E]."""
        return torch.matmul(self.fold(weights).transpose(-1, -2), self.fold(rows))
