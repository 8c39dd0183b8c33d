"""Places of a step's new tokens, found on the device from the step's tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.packed.packed import Packed
from anyflex.packed.row_tables import row_owners

__all__ = ["decoding_places", "token_places", "token_positions"]


def token_positions(packed: Packed, tokens: int) -> Tensor:
    """Return the position of each of `tokens` rows in its sequence, int32 [T]; 0 of padding."""
    _, position, owned = _positions(packed, tokens)
    return torch.where(owned, position, 0)


def token_places(packed: Packed, tokens: int, pages: int, page_size: int) -> tuple[Tensor, Tensor]:
    """Return where each of `tokens` rows is stored: page, and row in it, int64 [T].

    The page is `pages`, the one behind the pool's, for a row that isn't to be read: one behind the
    last sequence's, or whose page id lies outside of the pool. An entry of the page table past a
    sequence's length is never followed.
    """
    table = packed.page_table
    assert table is not None
    owner, position, live = _positions(packed, tokens)
    column = position // page_size
    slot = packed.slots[owner]
    rows, columns = table.shape
    live = live & (position >= 0) & (position < packed.kv_lengths[owner])
    live = live & (column < columns) & (slot >= 0) & (slot < rows)
    page = table[slot.clamp(0, rows - 1), column.clamp(0, columns - 1)]
    live = live & (page >= 0) & (page < pages)
    return torch.where(live, page, pages).long(), (position % page_size).long()


def decoding_places(packed: Packed, tokens: int, page_size: int) -> tuple[Tensor, Tensor]:
    """Return `token_places` of a batch whose first `tokens` sequences feed one token each, with a
    page for it, and whose others feed none."""
    assert packed.page_table is not None
    position, slot = packed.q_starts[:tokens], packed.slots[:tokens]
    page = packed.page_table[slot, position // page_size]
    return page.long(), (position % page_size).long()


def _positions(packed: Packed, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each row its sequence's number, its position, and whether it has a sequence."""
    row, owner = row_owners(packed, tokens)
    owned = (owner >= 0) & (owner < packed.sequences)
    owner = owner.clamp(0, packed.sequences - 1)
    return owner, packed.q_starts[owner] + (row - packed.q_offsets[owner]), owned
