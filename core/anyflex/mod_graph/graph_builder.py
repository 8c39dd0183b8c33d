"""Builder of a mod graph's nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from anyflex.mod_graph.node import Attribute, Node

__all__ = ["GraphBuilder", "is_number"]


def is_number(nodes: Sequence[Node], position: int) -> bool:
    """Tell whether a node is a Python number, converted or not."""
    node = nodes[position]
    while node.operation == "cast":
        node = nodes[node.arguments[0]]
    return node.operation in ("const", "number")


class GraphBuilder:
    """Appends nodes, each distinct one once."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes: list[Node] = []
        self._positions: dict[object, int] = {}
        for node in nodes:
            # Positions must not change, so a repeated node is kept here.
            key = _told_apart(node.operation, node.dtype, node.arguments, node.attribute)
            self._positions.setdefault(key, len(self.nodes))
            self.nodes.append(node)

    def add(
        self,
        operation: str,
        dtype: torch.dtype,
        arguments: tuple[int, ...] = (),
        attribute: Attribute = None,
    ) -> int:
        """Return the position of this node, appending it if it isn't there."""
        key = _told_apart(operation, dtype, arguments, attribute)
        position = self._positions.setdefault(key, len(self.nodes))
        if position == len(self.nodes):
            self.nodes.append(Node(operation, dtype, arguments, attribute))
        return position


def _told_apart(
    operation: str, dtype: torch.dtype, arguments: tuple[int, ...], attribute: Attribute
) -> object:
    """Key of nodes that are one value. A constant's is its text: 0.0 equals -0.0, 1 equals True,
    and NaN doesn't equal itself."""
    if attribute is None:
        return operation, dtype, arguments
    return operation, dtype, arguments, str(attribute)
