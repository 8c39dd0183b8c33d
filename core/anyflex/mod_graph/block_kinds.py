"""Kinds of the blocks of sequences whose lengths the device alone knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anyflex.mod_graph.block_graph import BlockGraph

__all__ = ["BlockGrid", "block_kinds"]


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """Blocks of a step, as the host knows them.

    Args:
        heads: number of heads.
        q_tiles, kv_blocks: how many there are of the longest sequence.
        q_block, kv_block: rows and columns of a block.
    """

    heads: int
    q_tiles: int
    kv_blocks: int
    q_block: int
    kv_block: int


def block_kinds(
    blocks: BlockGraph,
    grid: BlockGrid,
    *,
    slots: Tensor,
    q_starts: Tensor,
    q_lengths: Tensor,
    kv_lengths: Tensor,
    captured: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
) -> Tensor:
    """Return the kind of each block of each sequence: 0 dead, 1 FULL, 2 to be asked element by
    element. Nothing is copied to the host.

    Args:
        slots, q_starts, q_lengths, kv_lengths: int32 [N]: what the mask mod sees as b, and as the
            index of a sequence's first query; queries and keys of the sequence, 0 too.
        captured: what `BlockGraph.tensors` returns for this grid's q_block and kv_block.
        ints, floats: values of the graph's number slots.

    Returns:
        int32 [N, heads, q_tiles, kv_blocks], 0 beyond a sequence's lengths; a mask that doesn't
        read h has heads of stride 0.
    """
    device = q_lengths.device
    slot, start, q_length, kv_length = (
        each.to(torch.int64).view(-1, 1, 1, 1) for each in (slots, q_starts, q_lengths, kv_lengths)
    )
    row = torch.arange(0, grid.q_tiles * grid.q_block, grid.q_block, device=device).view(-1, 1)
    column = torch.arange(0, grid.kv_blocks * grid.kv_block, grid.kv_block, device=device)
    inputs = {
        "b": slot,
        "q_low": start + row,
        "q_high": start + (torch.minimum(row + grid.q_block, q_length) - 1),
        "kv_low": column,
        "kv_high": torch.minimum(column + grid.kv_block, kv_length) - 1,
    }
    if "h" in blocks.read:
        inputs["h"] = torch.arange(grid.heads, device=device).view(-1, 1, 1)
    for name, size in (("q_block", grid.q_block), ("kv_block", grid.kv_block)):
        if name in blocks.read:
            # full, not tensor: it fills on the device and copies nothing from the host.
            inputs[name] = torch.full((), size, device=device)
    (kind,) = blocks.evaluator(inputs, captured, ints, floats)
    kinds = torch.where((row < q_length) & (column < kv_length), kind, 0)
    return kinds.expand(-1, grid.heads, -1, -1)
