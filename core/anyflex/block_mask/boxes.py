"""Boxes of elements: whole blocks and parts of them that are still undecided."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from anyflex.intervals.bounds import tensor_of
from anyflex.intervals.cells import Cells
from anyflex.mod_graph.operations.bounds import End

__all__ = ["Boxes"]


class Boxes(NamedTuple):
    """Boxes of elements inside blocks: int64 [n] each; b and h are 0 where the mask has one grid.

    Args:
        owner: which of the blocks that are being decided the box belongs to.
        b, h: the batch entry and head.
        q_low, q_high, kv_low, kv_high: elements, both ends included.
    """

    owner: Tensor
    b: End
    h: End
    q_low: Tensor
    q_high: Tensor
    kv_low: Tensor
    kv_high: Tensor

    @classmethod
    def of_cells(cls, cells: Cells) -> Boxes:
        """Return single blocks, given as cells, as boxes."""
        ends = (cells.q_low, cells.q_high, cells.kv_low, cells.kv_high)
        owner = torch.arange(cells.count, device="cpu")
        return cls(owner, cells.b, cells.h, *map(tensor_of, ends))

    def chosen(self, where: Tensor) -> Boxes:
        """Return those where a bool tensor holds."""
        return self._each(operator.itemgetter(where))

    def split(self, size: int) -> list[Boxes]:
        """Return parts of at most `size`."""
        begins = range(0, self.owner.numel(), size)
        return [self._each(operator.itemgetter(slice(at, at + size))) for at in begins]

    def _each(self, function: Callable[[Tensor], Tensor]) -> Boxes:
        b, h = (function(f) if isinstance(f, Tensor) else f for f in (self.b, self.h))
        rest = (self.q_low, self.q_high, self.kv_low, self.kv_high)
        return Boxes(function(self.owner), b, h, *map(function, rest))

    def cells(self) -> Cells:
        """Return the boxes as cells, each one block of its own."""
        return Cells(
            self.owner.numel(),
            self.b,
            self.h,
            self.q_low,
            self.q_high,
            self.kv_low,
            self.kv_high,
            self.q_high - self.q_low + 1,
            self.kv_high - self.kv_low + 1,
        )

    def cut(self, q_side: int, q_parts: int, kv_side: int, kv_parts: int) -> Boxes:
        """Cut each box into `q_parts` x `kv_parts` of these sides; parts outside fall away."""
        parts = q_parts * kv_parts
        q_step = (torch.arange(q_parts, device="cpu") * q_side).repeat_interleave(kv_parts)
        kv_step = (torch.arange(kv_parts, device="cpu") * kv_side).repeat(q_parts)
        q_low = (self.q_low[:, None] + q_step).reshape(-1)
        kv_low = (self.kv_low[:, None] + kv_step).reshape(-1)
        whole = self._each(lambda field: field.repeat_interleave(parts))
        q_high = torch.minimum(q_low + (q_side - 1), whole.q_high)
        kv_high = torch.minimum(kv_low + (kv_side - 1), whole.kv_high)
        boxes = Boxes(whole.owner, whole.b, whole.h, q_low, q_high, kv_low, kv_high)
        return boxes.chosen((q_low <= q_high) & (kv_low <= kv_high))

    def witnesses(self) -> tuple[End, End, Tensor, Tensor]:
        """Return b, h, q_idx, kv_idx of each box's corners and centre, [n, 5]."""
        q, kv = (self.q_low + self.q_high) // 2, (self.kv_low + self.kv_high) // 2
        q_idx = torch.stack([self.q_low, self.q_low, self.q_high, self.q_high, q], 1)
        kv_idx = torch.stack([self.kv_low, self.kv_high, self.kv_low, self.kv_high, kv], 1)
        b, h = (f[:, None] if isinstance(f, Tensor) else f for f in (self.b, self.h))
        return b, h, q_idx, kv_idx

    def elements(self, q_side: int, kv_side: int) -> tuple[End, End, Tensor, Tensor]:
        """Return b, h, q_idx [n, q_side, 1] and kv_idx [n, 1, kv_side] of all elements.

        Where a box is smaller its last element is repeated, which changes neither any nor all.
        """
        q_idx = self.q_low[:, None] + torch.arange(q_side, device="cpu")
        kv_idx = self.kv_low[:, None] + torch.arange(kv_side, device="cpu")
        q_idx = torch.minimum(q_idx, self.q_high[:, None])[:, :, None]
        kv_idx = torch.minimum(kv_idx, self.kv_high[:, None])[:, None, :]
        b, h = (f[:, None, None] if isinstance(f, Tensor) else f for f in (self.b, self.h))
        return b, h, q_idx, kv_idx
