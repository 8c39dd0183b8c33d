"""Rows of blocks of a packed call: which sequence each belongs to, found on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.packed.packed import Packed

__all__ = ["BLOCK", "row_blocks", "static_row_blocks"]

BLOCK = 128
"""Query rows and keys of a block of a mask's structure."""


def row_blocks(packed: Packed, rows: int) -> Tensor:
    """Return `PackedRows.blocks`: on a CPU as many as there are, elsewhere `static_row_blocks`.

    Args:
        packed: the batch.
        rows: T, rows of the query tensor.
    """
    if packed.device.type != "cpu":
        return static_row_blocks(packed, rows)
    last = int(packed.q_offsets[-1])
    if last == packed.sequences and packed.max_q == 1:  # each has one row
        table = torch.zeros(last, 2, dtype=torch.int32)
        torch.arange(last, out=table[:, 0])
    else:
        first = torch.arange(0, packed.max_q, BLOCK, dtype=torch.int32)
        table = (first < packed.q_offsets.diff()[:, None]).nonzero().to(torch.int32).contiguous()
    if last >= rows:
        return table
    rest = torch.arange(-(-(rows - last) // BLOCK), dtype=torch.int32)
    return torch.cat([table, torch.stack([torch.full_like(rest, packed.sequences), rest], 1)])


def static_row_blocks(packed: Packed, rows: int) -> Tensor:
    """Return `PackedRows.blocks`, as many as the bounds allow, without waiting for the device.
    What its numbers say beyond the bounds is cut off."""
    lengths = packed.q_offsets.diff().clamp(0, packed.max_q)
    rest = (rows - packed.q_offsets[-1:]).clamp(0, rows)
    counts = (torch.cat([lengths, rest]) + (BLOCK - 1)) // BLOCK
    ends = counts.cumsum(0, dtype=torch.int32)
    owners = packed.sequences + 1
    most = min(rows, (rows + (BLOCK - 1) * owners) // BLOCK)
    row = torch.arange(most, dtype=torch.int32, device=packed.device)
    owner = torch.searchsorted(ends, row, right=True, out_int32=True)
    begins = torch.nn.functional.pad(ends, (1, 0))
    table = torch.stack([owner, row - begins[owner]], 1)
    return torch.where((owner < owners)[:, None], table, -1)
