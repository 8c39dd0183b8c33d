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
            found = self._stream(position)
            if found is not None:
                self.streams[position] = found
        self.strips = self._kept()

    def _reached(self, roots: Iterable[int]) -> list[int]:
        needed = set(roots)
        for position in range(len(self.nodes) - 1, -1, -1):
            if position in needed:
                needed.update(self.nodes[position].arguments)
        return sorted(needed)

    def column_roots(self) -> set[int]:
        """COLUMN nodes that pairs, or the results, read."""
        found = {root for root in self.roots if self.of[root] == COLUMN}
        for position in self.needed:
            if self.of[position] == PAIR:
                node = self.nodes[position]
                skipped = self.streams.get(position)
                for which, argument in enumerate(node.arguments):
                    # A stream follows its index without computing it for each column.
                    if skipped is not None and which == skipped[0]:
                        continue
                    if self.of[argument] == COLUMN:
                        found.add(argument)
        return found

    def _kept(self) -> list[int]:
        return sorted(root for root in self.column_roots() if self._costly[root])

    def columns_for(self, roots: Iterable[int]) -> list[int]:
        """The COLUMN nodes that `roots` need, in order."""
        return [p for p in self._reached(roots) if self.of[p] == COLUMN]

    def pairs(self) -> list[int]:
        """Nodes that are computed in the innermost loop, in order: PAIR nodes, and COLUMN nodes
        that aren't kept."""
        wanted: set[int] = set()
        stack = [root for root in self.roots if self.of[root] in (PAIR, COLUMN)]
        strips = set(self.strips)
        while stack:
            position = stack.pop()
            if position in wanted or position in strips:
                continue
            if self.of[position] in (TILE, ROW):
                continue
            wanted.add(position)
            skipped = self.streams.get(position)
            for which, argument in enumerate(self.nodes[position].arguments):
                if skipped is None or which != skipped[0]:
                    stack.append(argument)
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
        total = 0
        for sign, step in zip(
            (-1,) if node.operation == "neg" else (1, _SECOND[node.operation]), steps, strict=True
        ):
            if step is None:
                return None
            total += sign * step
        return total if total in (0, 1, -1) else None

    def _stream(self, position: int) -> tuple[int, int] | None:
        node = self.nodes[position]
        if node.operation != "load" or self.of[position] != PAIR:
            return None
        return self.moving_index(node.arguments)

    def moving_index(self, indices: Sequence[int]) -> tuple[int, int] | None:
        """(which, step) if all indices but one are fixed in a row and that one moves by 1."""
        moving = [i for i, index in enumerate(indices) if self.of[index] not in (TILE, ROW)]
        if len(moving) != 1:
            return None
        step = self.step(indices[moving[0]])
        return (moving[0], step) if step else None


_SECOND = {"add": 1, "sub": -1}
