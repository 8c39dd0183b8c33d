"""Rows of blocks of a packed call: which sequence each belongs to, found on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.packed.packed import Packed

__all__ = ["BLOCK", "offsets_within", "row_blocks", "static_offsets", "static_row_blocks"]

BLOCK = 128
"""Query rows and keys of a block of a mask's structure."""


def offsets_within(packed: Packed) -> Tensor:
    """Return a batch's q_offsets, within its bounds: a CPU's are checked when a step begins, those
    of a cache by its books, and others are `static_offsets`."""
    if packed.device.type == "cpu" or packed.known is not None:
        return packed.q_offsets.contiguous()
    return static_offsets(packed)


def static_offsets(packed: Packed) -> Tensor:
    """Return a batch's q_offsets, without waiting for the device. If they are wrong or a sequence
    has more than max_q rows, all are 0: rows are padding rows then, and none is left unwritten."""
    offsets = packed.q_offsets.contiguous()
    lengths = offsets.diff().clamp(0, packed.max_q)
    # These sums are the offsets again if nothing was cut off and the first one is 0.
    return offsets * (lengths.cumsum(0) == offsets[1:]).all()


def row_blocks(packed: Packed, offsets: Tensor, rows: int) -> Tensor:
    """Return `PackedRows.blocks`: on a CPU as many as there are, elsewhere `static_row_blocks`.

    Args:
        packed: the batch.
        offsets: int32 [N + 1], of its sequences' rows, within the bounds.
        rows: T, rows of the query tensor.
    """
    if packed.device.type != "cpu":
        return static_row_blocks(packed, offsets, rows)
    last = int(offsets[-1])
    if last == packed.sequences and packed.max_q == 1:  # each has one row
        table = torch.zeros(last, 2, dtype=torch.int32)
        torch.arange(last, out=table[:, 0])
    else:
        first = torch.arange(0, packed.max_q, BLOCK, dtype=torch.int32)
        table = (first < offsets.diff()[:, None]).nonzero().to(torch.int32).contiguous()
    if last >= rows:
        return table
    rest = torch.arange(-(-(rows - last) // BLOCK), dtype=torch.int32)
    return torch.cat([table, torch.stack([torch.full_like(rest, packed.sequences), rest], 1)])


def static_row_blocks(packed: Packed, offsets: Tensor, rows: int) -> Tensor:
    """Return `PackedRows.blocks`, as many as the bounds allow, without waiting for the device.
    Arguments are those of `row_blocks`."""
    count = packed.sequences
    if packed.max_q <= BLOCK and rows >= count:
        # One block for each sequence is about as few as other tables have, and needs no search.
        row = torch.arange(count + -(-rows // BLOCK), dtype=torch.int32, device=packed.device)
        owner = row.clamp(max=count)
        return torch.stack([owner, row - owner], 1)
    rest = (rows - offsets[-1:]).clamp(0, rows)
    counts = (torch.cat([offsets.diff(), rest]) + (BLOCK - 1)) // BLOCK
    ends = counts.cumsum(0, dtype=torch.int32)
    owners = count + 1
    most = min(rows, (rows + (BLOCK - 1) * owners) // BLOCK)
    row = torch.arange(most, dtype=torch.int32, device=packed.device)
    owner = torch.searchsorted(ends, row, right=True, out_int32=True)
    begins = torch.nn.functional.pad(ends, (1, 0))
    table = torch.stack([owner, row - begins[owner]], 1)
    return torch.where((owner < owners)[:, None], table, -1)
