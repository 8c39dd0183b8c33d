"""Runs as torch's index lists, made some rows of blocks at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anyflex.mask_structure.runs import FULL, PARTIAL

__all__ = ["IndexLists", "list_blocks"]

_BLOCKS = 1 << 20
"""Number of blocks that are worked on at once: about 50 bytes each."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexLists:
    """torch's layout: counts int32 [B', H', Qb] and block indices int32 [B', H', Qb, Kb].

    The first ``num_blocks`` indices of a row are its blocks, ascending; the others are the row's
    remaining columns, ascending, and mean nothing.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor


def list_blocks(
    grid_of: Callable[[int, int], Tensor],
    shape: tuple[int, int, int, int],
    *,
    ragged_row: bool = False,
    ragged_column: bool = False,
) -> IndexLists:
    """Return the lists of a block grid, on the CPU. The layout itself takes O(Qb * Kb) memory;
    beside it, a constant is needed.

    Args:
        grid_of: returns the kinds of blocks of some rows, int8 [B', H', rows, Kb], on the CPU;
            takes the first row and the end.
        shape: (B', H', Qb, Kb).
        ragged_row, ragged_column: FULL blocks of the last row, of the last column, are listed as
            PARTIAL.
    """
    *outer, rows, columns = shape
    counts = torch.empty((2, *outer, rows), dtype=torch.int32, device="cpu")
    indices = torch.empty((2, *shape), dtype=torch.int32, device="cpu")
    step = max(1, _BLOCKS // max(1, math.prod(outer) * columns))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        grid = grid_of(begin, end)
        if ragged_row and end == rows:
            grid[:, :, -1:].masked_fill_(grid[:, :, -1:] == FULL, PARTIAL)
        if ragged_column:
            grid[..., -1:].masked_fill_(grid[..., -1:] == FULL, PARTIAL)
        for place, kind in enumerate((PARTIAL, FULL)):
            rows_of = (slice(None), slice(None), slice(begin, end))
            _list_rows(grid == kind, counts[place][rows_of], indices[place][rows_of])
    return IndexLists(counts[0], indices[0], counts[1], indices[1])


def _list_rows(chosen: Tensor, counts: Tensor, indices: Tensor) -> None:
    """Fill counts [..., rows] and indices [..., rows, columns] from bool [..., rows, columns]."""
    columns = chosen.shape[-1]
    if not columns:
        counts.zero_()
        return
    # A chosen column goes behind the chosen ones before it, the others behind all of these.
    before = chosen.cumsum(-1)
    counts.copy_(before[..., -1])
    column = torch.arange(columns, device="cpu")
    place = torch.where(chosen, before - 1, before[..., -1:] + column - before)
    indices.scatter_(-1, place, column.to(torch.int32).expand_as(place))
