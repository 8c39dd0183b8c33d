"""A mod graph for people: one line a value, in the operators that a mod is written with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anyflex.mod_graph.operations import DTYPE_NAMES

if TYPE_CHECKING:
    from anyflex.mod_graph.graph import Node

__all__ = ["printed"]

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


def printed(nodes: Sequence[Node], output: int) -> str:
    """Return what the result is made of, as ``v0: i64 = q_idx - kv_idx`` a line.

    Inputs, constants, closed-over numbers (``i0``, ``f0``: slots of a call's ints and floats) and
    0-d captured tensors stand where they are used. A cast is written as its type's name.
    """
    needed = {output}
    for position in range(output, -1, -1):
        if position in needed:
            needed.update(nodes[position].arguments)
    names: dict[int, str] = {}
    lines: list[str] = []
    for position in sorted(needed):
        node = nodes[position]
        text = _expression(node, [names[argument] for argument in node.arguments])
        if node.arguments:
            names[position] = f"v{len(lines)}"
            lines.append(f"{names[position]}: {DTYPE_NAMES[node.dtype]} = {text}")
        else:
            names[position] = text
    return "\n".join([*lines, f"return {names[output]}"])


def _expression(node: Node, operands: list[str]) -> str:
    operation = node.operation
    if operation == "load":
        index = f"[{', '.join(operands)}]" if operands else ""
        return f"captured{node.attribute}{index}"
    if not operands:
        return str(node.attribute)
    if operation in _INFIX:
        return f"{operands[0]} {_INFIX[operation]} {operands[1]}"
    if operation in _PREFIX:
        return _PREFIX[operation] + operands[0]
    called = DTYPE_NAMES[node.dtype] if operation == "cast" else operation
    return f"{called}({', '.join(operands)})"
