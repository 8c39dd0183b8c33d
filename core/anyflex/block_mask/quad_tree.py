"""The quad tree over the lattice of blocks: which blocks are FULL, PARTIAL or not visited.

Squares of blocks are judged by `anyflex.intervals`; only those that stay undecided are cut in four
(Finkel and Bentley, "Quad trees", 1974), down to single blocks, which `open_blocks` decides. So a
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
from anyflex.intervals.bounds import tensor_of
from anyflex.intervals.cells import Cells
from anyflex.intervals.evaluation import Domain
from anyflex.mask_structure.runs import FULL, PARTIAL, RunList, block_count, merged

__all__ = ["Blocks", "Lattice", "QuadTree"]

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


class Lattice:
    """The blocks of a domain, and the cells that squares of them are."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.rows, self.columns = (
            block_count(length, size)
            for length, size in zip(domain.lengths, domain.block_size, strict=True)
        )

    def cells(self, blocks: Blocks, side: int) -> Cells:
        """Return the cells of squares of `side` x `side` blocks, cut off at the lengths."""
        q_block, kv_block = self.domain.block_size
        q_length, kv_length = self.domain.lengths
        q_low, kv_low = blocks.row * q_block, blocks.column * kv_block
        q_high = (q_low + (side * q_block - 1)).clamp(max=q_length - 1)
        kv_high = (kv_low + (side * kv_block - 1)).clamp(max=kv_length - 1)
        b, h = self.indices(blocks.place)
        # Only the last block may be shorter.
        return Cells(
            blocks.place.numel(),
            b,
            h,
            q_low,
            q_high,
            kv_low,
            kv_high,
            q_high % q_block + 1,
            kv_high % kv_block + 1,
            whole=True,
        )

    def boxes(self, blocks: Blocks) -> Boxes:
        """Return single blocks as boxes."""
        cells = self.cells(blocks, 1)
        ends = (cells.q_low, cells.q_high, cells.kv_low, cells.kv_high)
        owner = torch.arange(cells.count, device="cpu")
        return Boxes(owner, cells.b, cells.h, *map(tensor_of, ends))

    def indices(self, place: Tensor) -> tuple[Tensor | int, Tensor | int]:
        """Return b and h of places."""
        heads = self.domain.heads
        if self.domain.batch == heads == 1:
            return 0, 0
        return place // heads, place % heads


class QuadTree:
    """Decides the blocks of a domain.

    Args:
        elements: evaluates a traced mask mod, which may depend on b and h only where the
            domain's sizes are above 1.
        budget: the work that may be spent; blocks past it are PARTIAL.

    Attributes:
        judged: cells that ranges were computed for.
        open_blocks: the decider of the blocks that ranges left open.
    """

    def __init__(self, elements: TracedElements, domain: Domain, budget: Budget) -> None:
        self.lattice = Lattice(domain)
        self.judged = 0
        self._analysis = Analysis(elements.graph, elements.captured, domain)
        self.open_blocks = OpenBlocks(elements, self._analysis, domain.block_size, budget)
        self._found: list[tuple[Blocks, int, int]] = []
        self._count = 0
        self._gathered: list[RunList] = []
        self._elements = elements
        self._budget = budget
        self._left: Cells | None = None

    def build(self) -> RunList:
        """Return the runs of all blocks.

        Raises ModIndexError where a live element reads outside of a captured tensor.
        """
        lattice, domain = self.lattice, self.lattice.domain
        places = domain.batch * domain.heads
        if not (places and lattice.rows and lattice.columns):
            return _no_runs()
        side = 1
        while True:
            down, across = block_count(lattice.rows, side), block_count(lattice.columns, side)
            count = places * down * across
            if count <= _FIRST_CELLS or down == across == 1:
                break
            side *= 2
        for begin in range(0, count, _CELLS):
            index = torch.arange(begin, min(begin + _CELLS, count), device="cpu")
            line, column = index // across, index % across * side
            self._decide(Blocks(line // down, line % down * side, column), side)
        return _joined([*self._gathered, *self._pieces()])

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
            cells = self.lattice.cells(blocks, side)
            if not self._budget.take(CELL_COST * cells.count):
                self._keep(blocks, side, PARTIAL)
                self._left = self._left or cells
                continue
            true, false, mixed = self._analysis.verdict(cells)
            self.judged += cells.count
            self._keep(blocks.chosen(true), side, FULL)
            self._keep(blocks.chosen(mixed), side, PARTIAL)
            rest = blocks.chosen(~(true | false | mixed))
            if not rest.place.numel():
                continue
            if side == 1:
                some, lacking = self.open_blocks.decide(self.lattice.boxes(rest))
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
            inside = quarters.row < self.lattice.rows
            inside &= quarters.column < self.lattice.columns
            stack.append((quarters.chosen(inside), half))

    def _keep(self, blocks: Blocks, side: int, kind: int) -> None:
        if blocks.place.numel():
            self._found.append((blocks, side, kind))
            self._count += blocks.place.numel() * side
            if self._count > _PIECES:
                self._gather()

    def _gather(self) -> None:
        """Make runs of the squares found so far, and merge neighbours."""
        self._gathered = [
            merged(_joined([*self._gathered, *self._pieces()]), self.lattice.columns)
        ]

    def _pieces(self) -> list[RunList]:
        found, self._found, self._count = self._found, [], 0
        return [self._rows_of(*square) for square in found]

    def _rows_of(self, blocks: Blocks, side: int, kind: int) -> RunList:
        """Return squares of one side as a run a row."""
        row = blocks.place * self.lattice.rows + blocks.row
        first = blocks.column
        end = (first + side).clamp(max=self.lattice.columns)
        if side > 1:
            height = (self.lattice.rows - blocks.row).clamp(max=side)
            owner = torch.arange(height.numel(), device="cpu").repeat_interleave(height)
            begin = (height.cumsum(0) - height)[owner]
            row = row[owner] + torch.arange(owner.numel(), device="cpu") - begin
            first, end = first[owner], end[owner]
        return RunList(row, first, end, torch.full_like(row, kind))


def _joined(parts: list[RunList]) -> RunList:
    if not parts:
        return _no_runs()
    return RunList(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _no_runs() -> RunList:
    return RunList(*torch.zeros(4, 0, dtype=torch.int64, device="cpu"))
