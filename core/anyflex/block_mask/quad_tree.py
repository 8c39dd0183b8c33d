"""The quad tree over the lattice of blocks: which blocks are FULL, PARTIAL or not visited.

Squares of blocks are judged by `anyflex.intervals`; only those that stay undecided are cut in four
(Finkel and Bentley, "Quad trees", 1974), down to single blocks, which `OpenBlocks` decides. So a
mask costs what its border costs, never Q x KV.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anyflex.block_mask.boxes import Boxes
from anyflex.block_mask.elementwise_evaluation import TracedElements
from anyflex.block_mask.undecided_blocks import CELL_COST, Budget, OpenBlocks
from anyflex.intervals.analysis import Analysis
from anyflex.intervals.cells import Cells
from anyflex.intervals.evaluation import Domain
from anyflex.mask_structure.runs import FULL, PARTIAL, RunList, block_count, joined, merged, spread

__all__ = ["Blocks", "QuadTree"]

_FIRST_CELLS = 1024
"""Cells to start from: judging a thousand costs hardly more than judging one."""
_CELLS = 1 << 16
"""Number of cells judged at once, which bounds memory."""
_PIECES = 1 << 20
"""Number of pieces of rows at which they are merged to runs; masks with fewer are merged once."""


class Blocks(NamedTuple):
    """Squares of blocks: int64 [n] each.

    Args:
        place: ``batch entry * heads + head``.
        row, column: of the first block.
    """

    place: Tensor
    row: Tensor
    column: Tensor

    def chosen(self, where: Tensor) -> Blocks:
        """Return those where a bool tensor holds, or at given positions."""
        return Blocks(*(field[where] for field in self))

    def split(self, size: int) -> list[Blocks]:
        """Return parts of at most `size`."""
        begins = range(0, self.place.numel(), size)
        return [Blocks(*(f[begin : begin + size] for f in self)) for begin in begins]


class QuadTree:
    """Decides the blocks of a domain.

    Args:
        elements: evaluates a traced mask mod, which may depend on b and h only where the
            domain's sizes are above 1.
        budget: the work that may be spent; blocks past it are PARTIAL.

    Attributes:
        domain: as given.
        rows, columns: of blocks.
        open_blocks: the decider of the blocks that ranges left open.
    """

    def __init__(self, elements: TracedElements, domain: Domain, budget: Budget) -> None:
        self.rows, self.columns = (
            block_count(length, size)
            for length, size in zip(domain.lengths, domain.block_size, strict=True)
        )
        self.domain = domain
        self._analysis = Analysis(elements.graph, elements.captured, domain)
        self.open_blocks = OpenBlocks(elements, self._analysis, domain.block_size, budget)
        self._found: list[RunList] = []
        self._count = 0
        self._elements = elements
        self._budget = budget
        self._left: Cells | None = None

    def build(self) -> RunList:
        """Return the runs of all blocks.

        Raises ModIndexError where a live element reads outside of a captured tensor.
        """
        places = self.domain.batch * self.domain.heads
        if places and self.rows and self.columns:
            side = 1
            while True:
                down, across = block_count(self.rows, side), block_count(self.columns, side)
                count = places * down * across
                if count <= _FIRST_CELLS or down == across == 1:
                    break
                side *= 2
            for begin in range(0, count, _CELLS):
                index = torch.arange(begin, min(begin + _CELLS, count), device="cpu")
                line, column = index // across, index % across * side
                self._decide(Blocks(line // down, line % down * side, column), side)
        return joined(self._found)

    def undecided_term(self) -> str:
        """Return the first condition of the mask that ranges leave undecided where the budget
        ended, as an expression; "" if the budget sufficed."""
        cells = self._left or (self.open_blocks.left and self.open_blocks.left.cells())
        position = None if cells is None else self._analysis.undecided(cells)
        return "" if position is None else self._elements.expression(position)

    def _decide(self, blocks: Blocks, side: int) -> None:
        """Judge squares, depth first, so that few are pending at any time."""
        stack = [(blocks, side)]
        while stack:
            blocks, side = stack.pop()
            if blocks.place.numel() > _CELLS:
                stack += [(part, side) for part in blocks.split(_CELLS)]
                continue
            cells = self._cells(blocks, side)
            if not self._budget.take(CELL_COST * cells.count):
                self._keep(blocks, side, PARTIAL)
                self._left = self._left or cells
                continue
            true, false, mixed = self._analysis.verdict(cells)
            self._keep(blocks.chosen(true), side, FULL)
            self._keep(blocks.chosen(mixed), side, PARTIAL)
            rest = blocks.chosen(~(true | false | mixed))
            if not rest.place.numel():
                continue
            if side == 1:
                some, lacking = self.open_blocks.decide(Boxes.of_cells(self._cells(rest, 1)))
                self._keep(rest.chosen(some & ~lacking), 1, FULL)
                self._keep(rest.chosen(some & lacking), 1, PARTIAL)
                continue
            half = side // 2
            step = torch.tensor([0, half], device="cpu")
            quarters = Blocks(
                rest.place.repeat_interleave(4),
                (rest.row[:, None] + step.repeat_interleave(2)).reshape(-1),
                (rest.column[:, None] + step.repeat(2)).reshape(-1),
            )
            inside = (quarters.row < self.rows) & (quarters.column < self.columns)
            stack.append((quarters.chosen(inside), half))

    def _cells(self, blocks: Blocks, side: int) -> Cells:
        """Return the cells of squares of `side` x `side` blocks, cut off at the lengths."""
        q_block, kv_block = self.domain.block_size
        q_length, kv_length = self.domain.lengths
        q_low, kv_low = blocks.row * q_block, blocks.column * kv_block
        q_high = (q_low + (side * q_block - 1)).clamp(max=q_length - 1)
        kv_high = (kv_low + (side * kv_block - 1)).clamp(max=kv_length - 1)
        heads = self.domain.heads
        one = self.domain.batch == heads == 1
        # Only the last block may be shorter.
        return Cells(
            blocks.place.numel(),
            0 if one else blocks.place // heads,
            0 if one else blocks.place % heads,
            q_low,
            q_high,
            kv_low,
            kv_high,
            q_high % q_block + 1,
            kv_high % kv_block + 1,
            whole=True,
        )

    def _keep(self, blocks: Blocks, side: int, kind: int) -> None:
        """Note squares of one kind, as a run for each of their rows."""
        if not blocks.place.numel():
            return
        row, first = blocks.place * self.rows + blocks.row, blocks.column
        if side > 1:
            owner, below = spread((self.rows - blocks.row).clamp(max=side))
            row, first = row[owner] + below, first[owner]
        end = (first + side).clamp(max=self.columns)
        self._found.append(RunList(row, first, end, torch.full_like(row, kind)))
        self._count += row.numel()
        if self._count > _PIECES:
            self._found, self._count = [merged(joined(self._found), self.columns)], 0
