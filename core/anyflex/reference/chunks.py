"""Chunks of query rows: the keys that each visits, and the pairs that are live by structure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from anyflex.mask_structure.device_views import FULL, PARTIAL, MaskViews
from anyflex.reference.layout import Layout

__all__ = ["ELEMENTS", "Chunk", "chunks"]

ELEMENTS = 1 << 20
"""Number of scores of one chunk, over all batches and heads (a single row of each may hold more).
The reference holds a few times this many values at once, whatever the lengths. 4 MiB in float32:
among 2^17 to 2^22 the fastest on a desktop CPU, whose last-level cache then holds a chunk."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Query rows [begin, end) and the keys that at least one of them visits.

    Args:
        columns: the keys, a slice or int64 positions on the call's device.
        width: number of keys.
        kinds: int8 [B', Hkv or 1, G or 1, R or 1, C], on the call's device: 0 not visited, FULL,
            PARTIAL for each pair; or None where all are of one kind.
        holes: some pair is not visited.
        partial: the mask function applies to some pair.
        full: some pair is FULL.
    """

    begin: int
    end: int
    columns: slice | Tensor
    width: int
    kinds: Tensor | None
    holes: bool
    partial: bool
    full: bool

    def take(self, tensor: Tensor) -> Tensor:
        """[Bkv, Hkv, S, E] at this chunk's keys; a view where they are adjacent."""
        if isinstance(self.columns, slice):
            return tensor[:, :, self.columns]
        return tensor.index_select(2, self.columns)

    def add_to(self, total: Tensor, part: Tensor) -> None:
        """Add [Bkv, Hkv, C, E] to [Bkv, Hkv, S, E] at this chunk's keys."""
        if isinstance(self.columns, slice):
            total[:, :, self.columns] += part
        else:
            # Positions are distinct, so the order of additions is fixed.
            total.index_add_(2, self.columns, part)

    def kv_indices(self, device: torch.device) -> Tensor:
        """Positions of the keys, int64 [C]."""
        if isinstance(self.columns, slice):
            return torch.arange(self.columns.start, self.columns.stop, device=device)
        return self.columns


def chunks(layout: Layout, mask: MaskViews | None, device: torch.device) -> Iterator[Chunk]:
    """Cut the query rows into chunks of about `ELEMENTS` scores.

    The structure is read on the host (its copy there is made once and kept): reference calls
    can't be captured into a device graph.
    """
    row = max(1, layout.batch * layout.heads * layout.kv_length)
    rows = max(1, ELEMENTS // row)
    if mask is None:
        everything = slice(0, layout.kv_length)
        for begin in range(0, layout.q_length, rows):
            end = min(begin + rows, layout.q_length)
            yield Chunk(begin, end, everything, layout.kv_length, None, False, False, True)
        return
    host = mask.on(torch.device("cpu"))
    q_block = host.block_size[0]
    if rows >= q_block:
        rows -= rows % q_block
    begin = 0
    while begin < layout.q_length:
        # A chunk of less than a block ends with the block.
        end = min(begin + rows, layout.q_length)
        if rows < q_block:
            end = min(end, (begin // q_block + 1) * q_block)
        kinds = host.kind_rows(begin // q_block, (end - 1) // q_block + 1)
        yield _masked_chunk(layout, kinds, begin, end, host.block_size, device)
        begin = end


def _masked_chunk(
    layout: Layout,
    kinds: Tensor,
    begin: int,
    end: int,
    block_size: tuple[int, int],
    device: torch.device,
) -> Chunk:
    q_block, kv_block = block_size
    visited = (kinds != 0).flatten(0, 2).any(0).nonzero().flatten()
    if len(visited) == 0:
        return Chunk(begin, end, slice(0, 0), 0, None, True, False, False)
    first, last = int(visited[0]), int(visited[-1]) + 1
    start, stop = first * kv_block, min(last * kv_block, layout.kv_length)
    columns: slice | Tensor = slice(start, stop)
    positions = torch.arange(start, stop, device="cpu")
    if 2 * len(visited) <= last - first:
        # Far-apart visited blocks: gathering their keys is cheaper than scoring the gap.
        positions = positions[torch.isin(positions // kv_block, visited)]
        columns = positions.to(device)
    kinds = kinds[..., visited]
    block = positions // kv_block
    place = torch.searchsorted(visited, block).clamp_(max=len(visited) - 1)
    # Blocks between visited ones that nobody visits are holes too.
    gap = visited[place] != block
    holes = bool((kinds == 0).any()) or bool(gap.any())
    partial, full = bool((kinds == PARTIAL).any()), bool((kinds == FULL).any())
    elements = None
    if holes or (partial and full):
        elements = kinds[..., place].masked_fill_(gap, 0)
        if kinds.shape[2] > 1:
            row = torch.arange(begin, end, device="cpu") // q_block - begin // q_block
            elements = elements[:, :, row]
        elements = layout.grouped(elements.to(device))
    return Chunk(begin, end, columns, len(positions), elements, holes, partial, full)
