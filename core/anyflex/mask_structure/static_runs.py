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
    kinds = kinds.to(torch.int8)
    edged = torch.nn.functional.pad(kinds, (1, 1))
    changes = edged[..., 1:] != edged[..., :-1]
    visited = kinds != 0
    # Runs of a row are disjoint, so that the nth begin and the nth end are of one run.
    begins, ends = ((side & visited).flatten() for side in (changes[..., :-1], changes[..., 1:]))
    begun, ended = (flags.cumsum(0, dtype=torch.int32) for flags in (begins, ends))
    column = torch.arange(columns, dtype=torch.int32, device=device)
    first = torch.stack([column.expand_as(kinds), kinds.to(torch.int32)], -1)
    end = (column + 1).expand_as(kinds)
    runs = torch.zeros(blocks + 2, 3, dtype=torch.int32, device=device)
    # Blocks without an edge write past the last run, where no offset leads.
    runs[:, ::2].index_put_((torch.where(begins, begun - 1, blocks).long(),), first.flatten(0, 2))
    runs[:, 1].index_put_((torch.where(ends, ended - 1, blocks).long(),), end.flatten())
    edges = torch.nn.functional.pad(begun, (1, 0))
    row = torch.arange(heads, device=device)[:, None] * rows
    position = (row + torch.arange(rows + 1, device=device)) * columns
    return edges[position][None], runs
