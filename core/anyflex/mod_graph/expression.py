"""Nodes of a mod graph as expressions, for messages."""

from __future__ import annotations

from collections.abc import Sequence

from anyflex.mod_graph.graph import Node
from anyflex.mod_graph.operations import DTYPE_NAMES

__all__ = ["expression"]

_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "and": "&",
    "or": "|",
    "xor": "^",
    "shl": "<<",
    "shr": ">>",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}
_PREFIX = {"neg": "-", "not": "~"}
_LONGEST = 200


def expression(nodes: Sequence[Node], position: int, names: Sequence[str]) -> str:
    """Return the expression of a node, cut off after 200 characters.

    Args:
        nodes: of a graph.
        position: the node's.
        names: of the captured tensors.
    """
    text = _text(nodes, position, names, _LONGEST)
    if text[:1] == "(" and nodes[position].operation in _INFIX:
        text = text[1:-1]
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _text(nodes: Sequence[Node], position: int, names: Sequence[str], room: int) -> str:
    node = nodes[position]
    if room <= 0:  # shared operands could make it exponentially long
        return "..."
    if node.operation in ("input", "number", "const"):
        return str(node.attribute)
    parts: list[str] = []
    for argument in node.arguments:
        parts.append(_text(nodes, argument, names, room - sum(map(len, parts)) - 8))
    if node.operation == "load":
        assert isinstance(node.attribute, int)
        index = f"[{', '.join(parts)}]" if parts else ""
        return f"{names[node.attribute]}{index}"
    if node.operation in _INFIX:
        return f"({parts[0]} {_INFIX[node.operation]} {parts[1]})"
    if node.operation in _PREFIX:
        return f"{_PREFIX[node.operation]}{parts[0]}"
    if node.operation == "cast":
        return f"{parts[0]}.to({DTYPE_NAMES[node.dtype]})"
    return f"{node.operation}({', '.join(parts)})"
