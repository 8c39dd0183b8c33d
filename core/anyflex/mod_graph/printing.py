"""Printed form of a mod graph: one line a value, in the operators that a mod is written with."""

from __future__ import annotations

from collections.abc import Sequence

from anyflex.mod_graph.dtypes import DTYPE_NAMES
from anyflex.mod_graph.node import Node, reached
from anyflex.mod_graph.operations import RECORDS

__all__ = ["expression", "printed"]

_LONGEST = 200


def printed(nodes: Sequence[Node], output: int) -> str:
    """Return the nodes of the result, one line each: ``v0: i64 = q_idx - kv_idx``.

    Inputs, constants, closed-over numbers (``i0``, ``f0``: slots of a call's ints and floats) and
    0-d captured tensors are printed where they are used. A cast is written as its type's name.
    """
    names: dict[int, str] = {}
    lines: list[str] = []
    for position in reached(nodes, (output,)):
        node = nodes[position]
        text = _expression(node, [names[argument] for argument in node.arguments])
        if node.arguments:
            names[position] = f"v{len(lines)}"
            lines.append(f"{names[position]}: {DTYPE_NAMES[node.dtype]} = {text}")
        else:
            names[position] = text
    return "\n".join([*lines, f"return {names[output]}"])


def expression(nodes: Sequence[Node], position: int, names: Sequence[str]) -> str:
    """Return one value as a single expression, cut off after 200 characters, for messages.

    Args:
        names: of the captured tensors.
    """
    text = _nested(nodes, position, names, _LONGEST)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _nested(nodes: Sequence[Node], position: int, names: Sequence[str], room: int) -> str:
    if room <= 0:  # operands that are used often would make it exponentially long
        return "..."
    node = nodes[position]
    operands: list[str] = []
    for argument in node.arguments:
        text = _nested(nodes, argument, names, room - sum(map(len, operands)) - 8)
        inner = RECORDS[nodes[argument].operation]
        grouped = inner.sign and inner.operands == 2 and RECORDS[node.operation].sign
        operands.append(f"({text})" if grouped else text)
    return _expression(node, operands, names)


def _expression(node: Node, operands: list[str], names: Sequence[str] = ()) -> str:
    operation = node.operation
    if operation == "load":
        assert isinstance(node.attribute, int)
        name = names[node.attribute] if names else f"captured{node.attribute}"
        return f"{name}[{', '.join(operands)}]" if operands else name
    if not operands:
        return str(node.attribute)
    sign = RECORDS[operation].sign
    if sign:
        return f" {sign} ".join(operands) if len(operands) == 2 else sign + operands[0]
    called = DTYPE_NAMES[node.dtype] if operation == "cast" else operation
    return f"{called}({', '.join(operands)})"
