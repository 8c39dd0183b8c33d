"""Segments of the first and the last element of each block, which lookups of whole blocks read.

Built from the heads of the segments alone, by counting them into blocks: it costs nothing per
element, and the table is small enough to be read fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.intervals.batched_bools import Flag

__all__ = ["BlockEnds"]


class BlockEnds:
    """Segments at the ends of blocks, for rows [R, N].

    Args:
        heads: as for `SegmentTable`.
        shape: [R, N].
        length: elements of each row that blocks cover, at most N; the last one may be ragged.
        block: elements of a block.
    """

    def __init__(self, heads: Tensor, shape: torch.Size, length: int, block: int) -> None:
        rows, row_length = shape
        self._block = block
        self._shift = block.bit_length() - 1 if block & (block - 1) == 0 else None
        self._blocks = blocks = -(-length // block)
        row = heads // row_length if rows > 1 else 0
        place = heads - row * row_length
        # The head at `place` counts from the first block on that begins there or later, and that
        # ends there or later: heads behind the blocks count from the next row on.
        begins = self._block_of(place + (block - 1)).clamp(max=blocks) + row * blocks
        ends = torch.where(place < length, self._block_of(place), blocks) + row * blocks
        self._first, self._last = (
            torch.bincount(bucket, minlength=rows * blocks + 1)[: rows * blocks].cumsum(0) - 1
            for bucket in (begins, ends)
        )

    def look_up(self, row: Tensor | int, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Flag]:
        """See `RowTable`; `low` and `high` [n] are the ends of whole blocks."""
        start = row * self._blocks
        first, last = self._block_of(low), self._block_of(high)
        if not isinstance(start, int) or start:
            first, last = start + first, start + last
        return self._first.index_select(0, first), self._last.index_select(0, last), True

    def _block_of(self, element: Tensor) -> Tensor:
        # A division takes ten times as long as a shift.
        return element // self._block if self._shift is None else element >> self._shift
