"""Places of a step's new tokens, found on the device from the step's tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.packed.packed import Packed

__all__ = ["token_places", "token_positions"]


def token_positions(packed: Packed, tokens: int) -> Tensor:
    """Return the position of each of `tokens` rows in its sequence, int32 [T]; 0 of nobody's."""
    _, position, owned = _positions(packed, tokens)
    return torch.where(owned, position, 0)


def token_places(packed: Packed, tokens: int, pages: int, page_size: int) -> Tensor:
    """Return where each of `tokens` rows is stored: page * page_size + row, int64 [T].

    It is -1 for a row that isn't stored: one behind the last sequence's, or whose page id lies
    outside of the pool. An entry of the page table past a sequence's length is never followed.
    """
    table = packed.page_table
    assert table is not None
    owner, position, live = _positions(packed, tokens)
    column = position // page_size
    slot = packed.slots[owner]
    rows, columns = table.shape
    live = live & (position >= 0) & (position < packed.kv_lengths[owner])
    live = live & (column < columns) & (slot >= 0) & (slot < rows)
    page = table[slot.clamp(0, rows - 1).long(), column.clamp(0, columns - 1).long()].long()
    live = live & (page >= 0) & (page < pages)
    return torch.where(live, page * page_size + position % page_size, -1)


def _positions(packed: Packed, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each row its sequence's number, its position, and whether it has a sequence."""
    row = torch.arange(tokens, dtype=torch.int32, device=packed.device)
    owner = torch.searchsorted(packed.q_offsets[1:], row, right=True)
    owned = owner < packed.sequences
    owner = owner.clamp(max=packed.sequences - 1)
    return owner, packed.q_starts[owner] + (row - packed.q_offsets[owner]), owned
