"""Stages of a graph's nodes: whether each is computed once a tile, a row, a column, or for every
pair; and which reads of captured tensors run along a row's columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anyflex.plugin import Node

__all__ = ["COLUMN", "PAIR", "ROW", "TILE", "Stages"]

TILE, ROW, COLUMN, PAIR = 0, 1, 2, 3
"""A stage is the union of those of a node's operands, so that ROW | COLUMN is PAIR."""

_OF_INPUT = {"b": TILE, "h": TILE, "q_idx": ROW, "kv_idx": COLUMN, "score": PAIR, "grad": PAIR}
_CHEAP = frozenset(
    "input number const add sub mul neg abs and or xor not shl shr eq ne lt le gt ge minimum "
    "maximum where cast detach floor ceil trunc".split()
)


class Stages:
    """The stages of the nodes that `roots` need.

    Attributes:
        of: stage by position, for all nodes.
        needed: positions in evaluation order.
        strips: COLUMN nodes that are computed once a column and kept for the rows: those that
            cost more than reading them back.
        streams: position of a load -> (which index, step): all its other indices are fixed in a
            row, and this one grows by `step`, 1 or -1, a column.
        reads_score: positions whose value depends on the score.
    """

    def __init__(self, nodes: Sequence[Node], roots: Iterable[int]) -> None:
        self.nodes = nodes
        self.roots = tuple(roots)
        self.of: list[int] = []
        self.reads_score: set[int] = set()
        self._costly: list[bool] = []
        for position, node in enumerate(nodes):
            stage = _OF_INPUT[str(node.attribute)] if node.operation == "input" else TILE
            costly = node.operation not in _CHEAP
            if node.operation == "input" and node.attribute == "score":
                self.reads_score.add(position)
            for argument in node.arguments:
                stage |= self.of[argument]
                costly = costly or (self.of[argument] == COLUMN and self._costly[argument])
                if argument in self.reads_score:
                    self.reads_score.add(position)
            self.of.append(stage)
            self._costly.append(costly)
        self.needed = self._reached(self.roots)
        self.streams: dict[int, tuple[int, int]] = {}
        for position in self.needed:
            if nodes[position].operation == "load" and self.of[position] == PAIR:
                found = self.moving_index(nodes[position].arguments)
                if found is not None:
                    self.streams[position] = found
        self.strips = sorted(root for root in self.column_roots() if self._costly[root])

    def _reached(self, roots: Iterable[int]) -> list[int]:
        needed = set(roots)
        for position in range(len(self.nodes) - 1, -1, -1):
            if position in needed:
                needed.update(self.nodes[position].arguments)
        return sorted(needed)

    def _read_by(self, position: int) -> list[int]:
        """A node's arguments. A stream follows its index without computing it for each column."""
        skipped = self.streams.get(position, (None, 0))[0]
        arguments = self.nodes[position].arguments
        return [argument for which, argument in enumerate(arguments) if which != skipped]

    def column_roots(self) -> set[int]:
        """COLUMN nodes that pairs, or the results, read."""
        read = set(self.roots)
        for position in self.needed:
            if self.of[position] == PAIR:
                read.update(self._read_by(position))
        return {position for position in read if self.of[position] == COLUMN}

    def columns_for(self, roots: Iterable[int]) -> list[int]:
        """The COLUMN nodes that `roots` need, in order."""
        return [p for p in self._reached(roots) if self.of[p] == COLUMN]

    def pairs(self) -> list[int]:
        """Nodes that are computed in the innermost loop, in order: PAIR nodes, and COLUMN nodes
        that aren't kept."""
        wanted: set[int] = set()
        stack = list(self.roots)
        while stack:
            position = stack.pop()
            fixed = self.of[position] in (TILE, ROW) or position in self.strips
            if not fixed and position not in wanted:
                wanted.add(position)
                stack += self._read_by(position)
        return sorted(wanted)

    def step(self, position: int) -> int | None:
        """Growth of an integer node per column: 0, 1 or -1; None for anything else."""
        node = self.nodes[position]
        if self.of[position] in (TILE, ROW):
            return 0
        if node.operation == "input":
            return 1 if node.attribute == "kv_idx" else None
        if node.dtype.is_floating_point or node.operation not in ("add", "sub", "neg", "cast"):
            return None
        steps = [self.step(argument) for argument in node.arguments]
        if node.operation == "cast":
            source = self.nodes[node.arguments[0]].dtype
            wide = not source.is_floating_point and source.itemsize >= 4 <= node.dtype.itemsize
            return steps[0] if wide else None
        known = [step for step in steps if step is not None]
        if len(known) < len(steps):
            return None
        if node.operation != "add":
            known[-1] = -known[-1]
        total = sum(known)
        return total if total in (0, 1, -1) else None

    def moving_index(self, indices: Sequence[int]) -> tuple[int, int] | None:
        """(which, step) if all indices but one are fixed in a row and that one moves by 1."""
        moving = [i for i, index in enumerate(indices) if self.of[index] not in (TILE, ROW)]
        if len(moving) != 1:
            return None
        step = self.step(indices[moving[0]])
        return (moving[0], step) if step else None
