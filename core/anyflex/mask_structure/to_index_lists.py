"""Runs as torch's index lists, made some rows of blocks at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anyflex.mask_structure.runs import FULL, PARTIAL

if TYPE_CHECKING:
    from anyflex.mask_structure.device_views import MaskViews

__all__ = ["IndexLists", "list_blocks"]

_BLOCKS = 1 << 20
"""Blocks that are worked on at once: about 50 bytes each."""


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


def list_blocks(views: MaskViews, *, ragged_is_partial: bool = False) -> IndexLists:
    """Return the lists of `views`, on its device. The layout itself takes O(Qb * Kb) memory;
    beside it, a constant is needed.

    Args:
        ragged_is_partial: a FULL block that reaches past the lengths is listed as PARTIAL, as
            torch's create_block_mask lists it.
    """
    host = views.on(torch.device("cpu"))
    batch, heads, _ = host.offsets.shape
    rows, columns = host.q_blocks, host.kv_blocks
    shape = (batch, heads, rows)
    lists = IndexLists(
        torch.empty(shape, dtype=torch.int32, device="cpu"),
        torch.empty(*shape, columns, dtype=torch.int32, device="cpu"),
        torch.empty(shape, dtype=torch.int32, device="cpu"),
        torch.empty(*shape, columns, dtype=torch.int32, device="cpu"),
    )
    ragged_row = ragged_is_partial and views.q_length % views.block_size[0] != 0
    ragged_column = ragged_is_partial and views.kv_length % views.block_size[1] != 0
    step = max(1, _BLOCKS // max(1, batch * heads * columns))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        grid = host.kind_rows(begin, end)
        if ragged_row and end == rows:
            grid[:, :, -1:].masked_fill_(grid[:, :, -1:] == FULL, PARTIAL)
        if ragged_column:
            grid[..., -1:].masked_fill_(grid[..., -1:] == FULL, PARTIAL)
        for kind, counts, indices in (
            (PARTIAL, lists.kv_num_blocks, lists.kv_indices),
            (FULL, lists.full_kv_num_blocks, lists.full_kv_indices),
        ):
            _list_rows(grid == kind, counts[:, :, begin:end], indices[:, :, begin:end])
    if views is host:
        return lists
    return IndexLists(*(getattr(lists, name).to(views.device) for name in lists.__slots__))


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
