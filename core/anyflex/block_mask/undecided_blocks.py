"""Blocks that ranges leave open: witnesses, then smaller boxes, then the elements themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.block_mask.boxes import Boxes
from anyflex.block_mask.elementwise_evaluation import TracedElements
from anyflex.intervals.analysis import Analysis
from anyflex.mod_graph.operations.bounds import End

__all__ = ["DEFAULT_BUDGET", "Budget", "OpenBlocks"]

DEFAULT_BUDGET = 1 << 30
"""Default work limit of building before it leaves blocks PARTIAL, in elements evaluated:
seconds."""

CELL_COST = 64
"""Cost of judging a cell by ranges, in elements evaluated."""

_BOXES = 1 << 13
"""Number of boxes worked on at once."""
_SMALLEST_SIDE = 8
"""Boxes are cut down to this side; below it elements are cheaper."""


class Budget:
    """Work that building a mask may still do.

    Args:
        elements: the limit, in elements looked at; None for no limit.

    Attributes:
        spent: the cost so far.
        looked_at: elements that were evaluated one by one, without witnesses.
        exceeded: the rest of the mask stays undecided.
    """

    def __init__(self, elements: int | None) -> None:
        self._limit = elements
        self.spent = 0
        self.looked_at = 0
        self.exceeded = False

    def take(self, elements: int) -> bool:
        """Spend `elements`, or return False if they are not left."""
        if self.exceeded or (self._limit is not None and self.spent + elements > self._limit):
            self.exceeded = True
            return False
        self.spent += elements
        return True


class OpenBlocks:
    """Decides single blocks exactly, as far as the budget goes.

    Attributes:
        count: number of blocks decided here.
        left: some boxes that the budget did not reach, or None.
    """

    def __init__(
        self,
        elements: TracedElements,
        analysis: Analysis,
        block_size: tuple[int, int],
        budget: Budget,
    ) -> None:
        self.count = 0
        self._elements = elements
        self._analysis = analysis
        self._block_size = block_size
        self._budget = budget
        self.left: Boxes | None = None

    def decide(self, blocks: Boxes) -> tuple[Tensor, Tensor]:
        """Return bool tensors: some element of the block is live, some element is dead.

        Both are True where the budget ended before the block was decided: it becomes PARTIAL.

        Args:
            blocks: whole blocks; `owner` counts them from 0.
        """
        some = torch.zeros(blocks.owner.numel(), dtype=torch.bool, device="cpu")
        lacking = torch.zeros_like(some)
        self.count += some.numel()
        # Depth first, so that few boxes are pending at any time.
        stack = [(blocks, *self._block_size)]
        while stack:
            boxes, q_side, kv_side = stack.pop()
            if boxes.owner.numel() > _BOXES:
                stack += [(part, q_side, kv_side) for part in boxes.split(_BOXES)]
                continue
            boxes = boxes.chosen(~(some & lacking)[boxes.owner])
            if not boxes.owner.numel():
                continue
            count, small = boxes.owner.numel(), max(q_side, kv_side) <= _SMALLEST_SIDE
            if not self._budget.take(count * (q_side * kv_side if small else CELL_COST)):
                self.left = self.left or boxes
                some[boxes.owner] = True
                lacking[boxes.owner] = True
            elif small:
                self._budget.looked_at += count * q_side * kv_side
                self._look(boxes, boxes.elements(q_side, kv_side), some, lacking)
            else:
                # For most masks the corners and the centre show both values.
                self._look(boxes, boxes.witnesses(), some, lacking)
                boxes = boxes.chosen(~(some & lacking)[boxes.owner])
                q_parts, kv_parts = (min(4, -(-s // _SMALLEST_SIDE)) for s in (q_side, kv_side))
                # Rounded up, so that it also ends for sides that aren't a power of two.
                q_side, kv_side = -(-q_side // q_parts), -(-kv_side // kv_parts)
                if boxes.owner.numel():
                    boxes = boxes.cut(q_side, q_parts, kv_side, kv_parts)
                    stack.append((self._judge(boxes, some, lacking), q_side, kv_side))
        return some, lacking

    def _judge(self, boxes: Boxes, some: Tensor, lacking: Tensor) -> Boxes:
        """Note the result of ranges for boxes, and return the boxes that they leave open."""
        true, false, mixed = self._analysis.verdict(boxes.cells())
        some[boxes.owner[true | mixed]] = True
        lacking[boxes.owner[false | mixed]] = True
        return boxes.chosen(~(true | false | mixed))

    def _look(
        self,
        boxes: Boxes,
        elements: tuple[End, End, Tensor, Tensor],
        some: Tensor,
        lacking: Tensor,
    ) -> None:
        """Evaluate elements of each box."""
        live = self._elements.at(*elements).flatten(1)
        some[boxes.owner[live.any(1)]] = True
        lacking[boxes.owner[~live.all(1)]] = True
