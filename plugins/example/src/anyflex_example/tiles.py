"""Cutting a call into tiles: some query rows, and the keys that the block mask lets them visit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from anyflex.plugin import PARTIAL, Call

__all__ = ["Tile", "tiles"]

ROWS = 128
ALL = slice(None)


@dataclass(frozen=True)
class Tile:
    """Rows that visit the same keys.

    Args:
        batch, kv_heads, group, rows: positions in ``query.unflatten(1, (Hkv, G))``. Heads have two
            dimensions, because G query heads read one KV head.
        pieces: key positions, and whether the mask function applies to them (a PARTIAL run).
    """

    batch: slice
    kv_heads: slice
    group: slice
    rows: slice
    pieces: list[tuple[slice, bool]]

    def of_rows(self, tensor: Tensor, kv_heads: int) -> Tensor:
        """A view of [B, Hq, L, ...] at this tile: [b, hkv, g, rows, ...]."""
        grouped = torch.unflatten(tensor, 1, (kv_heads, -1))
        return grouped[self.batch, self.kv_heads, self.group, self.rows]

    def of_keys(self, tensor: Tensor, keys: slice) -> Tensor:
        """A view of [Bkv, Hkv, S, ...] at some keys: [b or 1, hkv, keys, ...]."""
        return tensor[self.batch if tensor.shape[0] > 1 else ALL, self.kv_heads, keys]

    def indices(self, call: Call, keys: slice) -> dict[str, Tensor]:
        """Index inputs of mods, in shapes that broadcast to [b, hkv, g, rows, keys]."""
        device = call.query.device
        batch, heads = call.query.shape[:2]
        b, h, q, kv = call.index_offsets
        grouped = torch.arange(heads, device=device).view(call.key.shape[1], -1)
        return {
            "b": b + torch.arange(batch, device=device)[self.batch].view(-1, 1, 1, 1, 1),
            "h": h + grouped[self.kv_heads, self.group].unsqueeze(-1).unsqueeze(-1),
            "q_idx": q + torch.arange(self.rows.start, self.rows.stop, device=device).view(-1, 1),
            "kv_idx": kv + torch.arange(keys.start, keys.stop, device=device),
        }


def tiles(call: Call, keys_at_once: int) -> Iterator[Tile]:
    """Yield tiles that cover every query row once, rows without any key included."""
    length, kv_length = call.query.shape[2], call.key.shape[2]
    if call.query.numel() == 0:
        return
    if call.mask is None:
        pieces = [(keys, False) for keys in _cut(0, kv_length, keys_at_once)]
        for rows in _cut(0, length, ROWS):
            yield Tile(ALL, ALL, ALL, rows, pieces)
        return
    # On the host, where this loop runs: copied at most once for a mask. A kernel that is compiled
    # for a device reads offsets and runs there.
    mask = call.mask.on(torch.device("cpu"))
    runs = mask.runs.tolist()
    q_block, kv_block = mask.block_size
    for batch, kv_heads, group, offsets in _heads(call, mask.offsets):
        for row, (begin, end) in enumerate(itertools.pairwise(offsets)):
            # The last block of either side may be ragged, also inside of a FULL run.
            pieces = [
                (keys, kind == PARTIAL)
                for first, last, kind in runs[begin:end]
                for keys in _cut(first * kv_block, min(last * kv_block, kv_length), keys_at_once)
            ]
            for rows in _cut(row * q_block, min((row + 1) * q_block, length), ROWS):
                yield Tile(batch, kv_heads, group, rows, pieces)


def _heads(call: Call, offsets: Tensor) -> Iterator[tuple[slice, slice, slice, list[int]]]:
    """The batches and heads of each (batch, head) of the mask, and its offsets. A mask with batch
    or heads 1 serves all of them at once."""
    ratio = call.query.shape[1] // call.key.shape[1]
    for b, of_batch in enumerate(offsets.tolist()):
        batch = slice(b, b + 1) if len(offsets) > 1 else ALL
        for h, of_head in enumerate(of_batch):
            if len(of_batch) == 1:
                yield batch, ALL, ALL, of_head
            else:
                kv, g = divmod(h, ratio)
                yield batch, slice(kv, kv + 1), slice(g, g + 1), of_head


def _cut(begin: int, end: int, size: int) -> Iterator[slice]:
    for start in range(begin, end, size):
        yield slice(start, min(start + size, end))
