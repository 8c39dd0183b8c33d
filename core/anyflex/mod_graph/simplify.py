"""Simplification of a mod graph that changes no bit of any result.

Constants are folded, neutral operands and dead nodes dropped, equal nodes merged. Rules on floats
hold for NaN, infinities and -0.0 too: ``x * 1`` goes, ``x + 0.0`` stays (it turns -0.0 into 0.0),
``x * 0`` stays. No gradient changes either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from anyflex.mod_graph.dtypes import type_class
from anyflex.mod_graph.evaluate import evaluate
from anyflex.mod_graph.graph import ModGraph
from anyflex.mod_graph.graph_builder import GraphBuilder, is_number
from anyflex.mod_graph.node import Node, reached

__all__ = ["simplify", "simplify_nodes"]

_SELF_COMPARISONS = {"eq": True, "le": True, "ge": True, "ne": False, "lt": False, "gt": False}

# Lossless conversions, so that converting back restores the value.
_EXACT_BITS = {
    torch.bool: 1,
    torch.uint8: 8,
    torch.int8: 8,
    torch.int16: 16,
    torch.int32: 32,
    torch.int64: 64,
}
_WIDER_FLOATS = {
    torch.float16: (torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


def simplify(graph: ModGraph) -> ModGraph:
    """Return an equivalent graph: the same bits for the same inputs."""
    nodes, (output,) = simplify_nodes(graph.nodes, (graph.output,))
    return ModGraph(nodes, output)


def simplify_nodes(
    nodes: Sequence[Node], roots: Sequence[int]
) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    """Simplify nodes with several results.

    Args:
        nodes: in evaluation order.
        roots: positions of the results.

    Returns:
        (the nodes that are left, positions of the results in them).
    """
    pass_ = _Pass()
    moved: list[int] = []
    for node in nodes:
        arguments = tuple(moved[argument] for argument in node.arguments)
        if node.operation in ("minimum", "maximum") and node.dtype.is_floating_point:
            arguments = pass_.kept_operands(nodes, node.arguments, arguments)
        moved.append(pass_.simplified(node.operation, node.dtype, arguments, node))
    return _without_dead(pass_.builder.nodes, [moved[root] for root in roots])


def _without_dead(
    nodes: Sequence[Node], roots: Sequence[int]
) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    places = {position: place for place, position in enumerate(reached(nodes, roots))}
    kept = tuple(
        replace(nodes[position], arguments=tuple(places[a] for a in nodes[position].arguments))
        for position in places
    )
    return kept, tuple(places[root] for root in roots)


class _Pass:
    def __init__(self) -> None:
        self.builder = GraphBuilder()

    def simplified(
        self, operation: str, dtype: torch.dtype, arguments: tuple[int, ...], node: Node
    ) -> int:
        """Return the position of a node that equals this one."""
        if arguments and operation != "load":
            if all(self.at(argument).operation == "const" for argument in arguments):
                return self.folded(operation, dtype, arguments)
            position = self.shortcut(operation, dtype, arguments)
            if position is not None:
                return position
        return self.builder.add(operation, dtype, arguments, node.attribute)

    def kept_operands(
        self, nodes: Sequence[Node], before: tuple[int, ...], after: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return the operands of a minimum or maximum, numbers only where they were numbers.

        Against a number it is a clamp, whose gradient at a tie is another (its record in
        `operations.arithmetic`): an operand that turned out to be constant is hidden behind a
        ``detach``.
        """
        if all(self.at(argument).operation == "const" for argument in after):
            return after
        return tuple(
            self.builder.add("detach", self.at(new).dtype, (new,))
            if is_number(self.builder.nodes, new) and not is_number(nodes, old)
            else new
            for old, new in zip(before, after, strict=True)
        )

    def at(self, position: int) -> Node:
        return self.builder.nodes[position]

    def const(self, value: float | bool, dtype: torch.dtype) -> int:
        return self.builder.add("const", dtype, (), value)

    def folded(self, operation: str, dtype: torch.dtype, arguments: tuple[int, ...]) -> int:
        constants = [self.at(argument) for argument in arguments]
        probe = Node(operation, dtype, tuple(range(len(constants))))
        (value,) = evaluate(
            [*constants, probe], [len(constants)], inputs={}, captured=(), ints=(), floats=()
        )
        return self.const(value.item(), dtype)

    def is_const(self, position: int, value: float | bool) -> bool:
        node = self.at(position)
        if node.operation != "const":
            return False
        number = node.attribute
        assert isinstance(number, (bool, int, float))
        # -0.0 equals 0.0 and is another number.
        return number == value and math.copysign(1, number) == math.copysign(1, value)

    def shortcut(
        self, operation: str, dtype: torch.dtype, arguments: tuple[int, ...]
    ) -> int | None:
        """Return the position of the node that this one reduces to, or None."""
        if operation == "cast":
            return self.cast_shortcut(dtype, arguments[0])
        if operation == "where":
            return self.where_shortcut(dtype, arguments)
        if len(arguments) == 1:
            return self.unary_shortcut(operation, arguments[0])
        x, y = arguments
        if self.at(x).operation == "const" and operation in ("add", "mul", "and", "or", "xor"):
            x, y = y, x
        kind = type_class(self.at(x).dtype)
        if kind == "float":
            return self.float_shortcut(operation, dtype, x, y)
        return self.exact_shortcut(operation, dtype, x, y, kind)

    def cast_shortcut(self, dtype: torch.dtype, x: int) -> int | None:
        inner = self.at(x)
        if inner.dtype is dtype:
            return x
        if inner.operation == "cast" and self.at(inner.arguments[0]).dtype is dtype:
            # dtype -> wider -> dtype
            if inner.dtype in _WIDER_FLOATS.get(dtype, ()):
                return inner.arguments[0]
            bits = _EXACT_BITS.get(dtype)
            if bits is not None and bits <= _EXACT_BITS.get(inner.dtype, 0):
                return inner.arguments[0]
        return None

    def where_shortcut(self, dtype: torch.dtype, arguments: tuple[int, ...]) -> int | None:
        condition, x, y = arguments
        if self.at(condition).operation == "const":
            return x if self.at(condition).attribute else y
        if x == y:
            return x
        if dtype is torch.bool:
            if self.is_const(x, True) and self.is_const(y, False):
                return condition
            if self.is_const(x, False) and self.is_const(y, True):
                return self.builder.add("not", torch.bool, (condition,))
        return None

    def unary_shortcut(self, operation: str, x: int) -> int | None:
        inner = self.at(x)
        if operation in ("neg", "not") and inner.operation == operation:
            return inner.arguments[0]
        if operation in ("floor", "ceil", "round", "trunc") and (
            inner.operation in ("floor", "ceil", "round", "trunc")
            or type_class(inner.dtype) != "float"
        ):
            return x
        return None

    def float_shortcut(self, operation: str, dtype: torch.dtype, x: int, y: int) -> int | None:
        if operation in ("mul", "truediv", "pow") and self.is_const(y, 1.0):
            return x
        if operation == "add" and self.is_const(y, -0.0):
            return x
        if operation == "sub" and self.is_const(y, 0.0):
            return x
        if operation == "pow" and self.is_const(y, 2.0):
            return self.builder.add("mul", dtype, (x, x))
        if operation in ("minimum", "maximum") and x == y:
            return x
        return None

    def exact_shortcut(
        self, operation: str, dtype: torch.dtype, x: int, y: int, kind: str
    ) -> int | None:
        """Rules for ints and bools."""
        zero = self.is_const(y, False if kind == "bool" else 0)
        one = kind == "int" and self.is_const(y, 1)
        ones = self.is_const(y, True) if kind == "bool" else self.all_ones(y)
        if zero and operation in ("add", "sub", "or", "xor", "shl", "shr"):
            return x
        if zero and operation in ("mul", "and"):
            return y
        if one and operation in ("mul", "floordiv", "pow"):
            return x
        if one and operation in ("mod", "fmod"):
            return self.const(0, dtype)
        if ones and operation == "and":
            return x
        if ones and operation == "or":
            return y
        if ones and operation == "xor":
            return self.builder.add("not", dtype, (x,))
        if operation == "pow" and self.is_const(y, 2):
            return self.builder.add("mul", dtype, (x, x))
        if x == y:
            if operation in ("and", "or", "minimum", "maximum"):
                return x
            if operation in ("sub", "xor"):
                return self.const(False if kind == "bool" else 0, dtype)
            if operation in _SELF_COMPARISONS:
                return self.const(_SELF_COMPARISONS[operation], torch.bool)
        return None

    def all_ones(self, position: int) -> bool:
        node = self.at(position)
        if node.dtype is torch.uint8:
            return self.is_const(position, 255)
        return self.is_const(position, -1)
