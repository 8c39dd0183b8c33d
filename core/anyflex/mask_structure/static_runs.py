"""Runs of a grid of kinds on any device: shapes follow from the grid's, and nothing is read."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["runs_of_kinds"]


def runs_of_kinds(kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `anyflex.mask_structure.runs.pack` does, with room for a run a block.

    Args:
        kinds: [heads, rows, columns] of blocks, 0 where nothing is visited.

    Returns:
        offsets int32 [1, heads, rows + 1] and runs int32 [blocks + 2, 3].
    """
    heads, rows, columns = kinds.shape
    device, blocks = kinds.device, kinds.numel()
    runs = torch.zeros(blocks + 2, 3, dtype=torch.int32, device=device)
    if blocks == 0:
        return torch.zeros(1, heads, rows + 1, dtype=torch.int32, device=device), runs
    edged = torch.nn.functional.pad(kinds, (1, 1))
    changes, visited = edged[..., 1:] != edged[..., :-1], kinds != 0
    # Runs of a row are disjoint, so that the nth begin and the nth end are of one run.
    begins = (changes[..., :-1] & visited).flatten()
    ends = (changes[..., 1:] & visited).flatten()
    begun = begins.cumsum(0)
    column = torch.arange(columns, dtype=torch.int32, device=device).expand(heads, rows, columns)
    first = torch.stack([column, kinds.to(torch.int32)], -1).flatten(0, 2)
    # Blocks without an edge write to place -1, the last, where no offset leads.
    runs[:, ::2].index_put_((begun * begins - 1,), first)
    runs[:, 1].index_put_((ends.cumsum(0) * ends - 1,), first[:, 0] + 1)
    # Each head's offsets begin where those of the one before end.
    edges = torch.nn.functional.pad(begun[columns - 1 :: columns].to(torch.int32), (1, 0))
    return edges.unfold(0, rows + 1, rows).contiguous()[None], runs
