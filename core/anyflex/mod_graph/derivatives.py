"""Derivative formulas of the scalar operations, as torch's autograd has them, kinks included.

A formula takes a `Formulas` (it appends nodes), the position of the node, and the position of the
gradient of its value; it returns one gradient an argument, None where it isn't wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from anyflex.mod_graph.graph import GraphBuilder, is_number
from anyflex.mod_graph.node import Node
from anyflex.mod_graph.torch_derivatives import clamp_stops_at_numbers

__all__ = ["DIFFERENTIABLE", "Formulas"]

Gradients: TypeAlias = "tuple[int | None, ...]"


class Formulas:
    """Appends derivative nodes to a graph.

    Args:
        builder: holds the graph's nodes.
        active: positions whose gradient is wanted.
    """

    def __init__(self, builder: GraphBuilder, active: set[int]) -> None:
        self.builder = builder
        self.active = active

    def node(self, position: int) -> Node:
        return self.builder.nodes[position]

    def gradients(self, position: int, grad: int) -> Gradients:
        """Return the gradients of the node's arguments."""
        return DIFFERENTIABLE[self.node(position).operation](self, position, grad)

    def op(self, operation: str, *arguments: int) -> int:
        """Append an operation whose result has its first operand's type."""
        return self.builder.add(operation, self.node(arguments[0]).dtype, arguments)

    def test(self, comparison: str, x: int, y: int) -> int:
        return self.builder.add(comparison, torch.bool, (x, y))

    def const(self, value: float, like: int) -> int:
        return self.builder.add("const", self.node(like).dtype, (), float(value))

    def times(self, x: int, value: float) -> int:
        return self.op("mul", x, self.const(value, x))

    def plus(self, x: int, value: float) -> int:
        return self.op("add", x, self.const(value, x))

    def select(self, condition: int, x: int, y: int) -> int:
        return self.builder.add("where", self.node(x).dtype, (condition, x, y))

    def kept(self, condition: int, grad: int) -> int:
        """Return `grad` where the condition holds, else 0: never ``grad * 0``, which keeps NaN."""
        return self.select(condition, grad, self.const(0.0, grad))

    def dropped(self, condition: int, grad: int) -> int:
        return self.select(condition, self.const(0.0, grad), grad)

    def is_number(self, position: int) -> bool:
        """Whether a node is a Python number, converted or not."""
        return is_number(self.builder.nodes, position)

    def wanted(self, position: int, which: int) -> bool:
        return self.node(position).arguments[which] in self.active


Formula: TypeAlias = Callable[[Formulas, int, int], Gradients]
_Partial: TypeAlias = Callable[[Formulas, int, int, int, int], int]
_Unary: TypeAlias = Callable[[Formulas, int, int, int], int]


def _binary(first: _Partial, second: _Partial) -> Formula:
    def formula(f: Formulas, position: int, grad: int) -> Gradients:
        x, y = f.node(position).arguments
        return (
            first(f, grad, x, y, position) if f.wanted(position, 0) else None,
            second(f, grad, x, y, position) if f.wanted(position, 1) else None,
        )

    return formula


def _unary(partial: _Unary) -> Formula:
    def formula(f: Formulas, position: int, grad: int) -> Gradients:
        return (partial(f, grad, f.node(position).arguments[0], position),)

    return formula


def _pow_base(f: Formulas, g: int, x: int, y: int, result: int) -> int:
    slope = f.op("mul", y, f.op("pow", x, f.plus(y, -1.0)))
    return f.dropped(f.test("eq", y, f.const(0.0, y)), f.op("mul", g, slope))


def _pow_exponent(f: Formulas, g: int, x: int, y: int, result: int) -> int:
    flat = f.op(
        "and",
        f.test("eq", x, f.const(0.0, x)),
        f.test("ge", y, f.const(0.0, y)),
    )
    return f.dropped(flat, f.op("mul", g, f.op("mul", result, f.op("log", x))))


def _extremum(loses: str, inside: str) -> Formula:
    """minimum and maximum: `loses(x, y)` says that x is not the result, `inside(x, y)` that a
    clamp by the number y passes x's gradient on."""

    def formula(f: Formulas, position: int, grad: int) -> Gradients:
        x, y = f.node(position).arguments
        # Against a number it is a clamp: no gradient passes at NaN.
        if f.is_number(y):
            return f.kept(f.test(inside, x, y), grad), None
        if f.is_number(x):
            return None, f.kept(f.test(inside, y, x), grad)
        halved = f.select(f.test("eq", x, y), f.times(grad, 0.5), grad)
        return (
            f.dropped(f.test(loses, x, y), halved) if f.wanted(position, 0) else None,
            f.dropped(f.test(loses, y, x), halved) if f.wanted(position, 1) else None,
        )

    return formula


def _atan2(sign: float, numerator: int) -> _Partial:
    def partial(f: Formulas, g: int, x: int, y: int, result: int) -> int:
        squares = f.op("add", f.op("mul", x, x), f.op("mul", y, y))
        origin = f.test("eq", squares, f.const(0.0, squares))
        reciprocal = f.dropped(origin, f.op("truediv", f.const(1.0, squares), squares))
        return f.op("mul", f.op("mul", g, f.times((x, y)[numerator], sign)), reciprocal)

    return partial


def _where(f: Formulas, position: int, grad: int) -> Gradients:
    condition = f.node(position).arguments[0]
    return (
        None,
        f.kept(condition, grad) if f.wanted(position, 1) else None,
        f.dropped(condition, grad) if f.wanted(position, 2) else None,
    )


def _cast(f: Formulas, position: int, grad: int) -> Gradients:
    # The gradient is converted to its own type where it is added up.
    return (grad,)


def _pass(f: Formulas, g: int, x: int, y: int, result: int) -> int:
    return g


def _inverse_root(f: Formulas, g: int, radicand: int) -> int:
    return f.op("mul", g, f.op("rsqrt", radicand))


def _complement_of_square(f: Formulas, x: int) -> int:
    return f.plus(f.op("neg", f.op("mul", x, x)), 1.0)


DIFFERENTIABLE: dict[str, Formula] = {
    "add": _binary(_pass, _pass),
    "sub": _binary(_pass, lambda f, g, x, y, r: f.op("neg", g)),
    "mul": _binary(
        lambda f, g, x, y, r: f.op("mul", g, y),
        lambda f, g, x, y, r: f.op("mul", g, x),
    ),
    "truediv": _binary(
        lambda f, g, x, y, r: f.op("truediv", g, y),
        lambda f, g, x, y, r: f.op("mul", f.op("neg", g), f.op("truediv", r, y)),
    ),
    "mod": _binary(
        _pass, lambda f, g, x, y, r: f.op("mul", f.op("neg", g), f.op("floordiv", x, y))
    ),
    "fmod": _binary(
        _pass,
        lambda f, g, x, y, r: f.op("mul", f.op("neg", g), f.op("trunc", f.op("truediv", x, y))),
    ),
    "pow": _binary(_pow_base, _pow_exponent),
    "minimum": _extremum("gt", "lt" if clamp_stops_at_numbers else "le"),
    "maximum": _extremum("lt", "gt" if clamp_stops_at_numbers else "ge"),
    "atan2": _binary(_atan2(1.0, 1), _atan2(-1.0, 0)),
    "neg": _unary(lambda f, g, x, r: f.op("neg", g)),
    "abs": _unary(lambda f, g, x, r: f.op("mul", g, f.op("sign", x))),
    "where": _where,
    "cast": _cast,
    "exp": _unary(lambda f, g, x, r: f.op("mul", g, r)),
    "exp2": _unary(lambda f, g, x, r: f.times(f.op("mul", g, r), math.log(2))),
    "expm1": _unary(lambda f, g, x, r: f.op("mul", g, f.plus(r, 1.0))),
    "log": _unary(lambda f, g, x, r: f.op("truediv", g, x)),
    "log2": _unary(lambda f, g, x, r: f.op("truediv", g, f.times(x, math.log(2)))),
    "log10": _unary(lambda f, g, x, r: f.op("truediv", g, f.times(x, math.log(10)))),
    "log1p": _unary(lambda f, g, x, r: f.op("truediv", g, f.plus(x, 1.0))),
    "sqrt": _unary(lambda f, g, x, r: f.op("truediv", g, f.times(r, 2.0))),
    "rsqrt": _unary(
        lambda f, g, x, r: f.op("mul", f.times(g, -0.5), f.op("mul", r, f.op("mul", r, r)))
    ),
    "sin": _unary(lambda f, g, x, r: f.op("mul", g, f.op("cos", x))),
    "cos": _unary(lambda f, g, x, r: f.op("mul", g, f.op("neg", f.op("sin", x)))),
    "tan": _unary(lambda f, g, x, r: f.op("mul", g, f.plus(f.op("mul", r, r), 1.0))),
    "asin": _unary(lambda f, g, x, r: _inverse_root(f, g, _complement_of_square(f, x))),
    "acos": _unary(
        lambda f, g, x, r: f.op("neg", _inverse_root(f, g, _complement_of_square(f, x)))
    ),
    "atan": _unary(lambda f, g, x, r: f.op("truediv", g, f.plus(f.op("mul", x, x), 1.0))),
    "sinh": _unary(lambda f, g, x, r: f.op("mul", g, f.op("cosh", x))),
    "cosh": _unary(lambda f, g, x, r: f.op("mul", g, f.op("sinh", x))),
    "tanh": _unary(lambda f, g, x, r: f.op("mul", g, _complement_of_square(f, r))),
    "asinh": _unary(lambda f, g, x, r: _inverse_root(f, g, f.plus(f.op("mul", x, x), 1.0))),
    "acosh": _unary(lambda f, g, x, r: _inverse_root(f, g, f.plus(f.op("mul", x, x), -1.0))),
    "atanh": _unary(lambda f, g, x, r: f.op("truediv", g, _complement_of_square(f, x))),
    "sigmoid": _unary(
        lambda f, g, x, r: f.op("mul", f.op("mul", g, f.plus(f.op("neg", r), 1.0)), r)
    ),
    "erf": _unary(lambda f, g, x, r: f.op("mul", g, _bell(f, x))),
    "erfc": _unary(lambda f, g, x, r: f.op("neg", f.op("mul", g, _bell(f, x)))),
}
"""Operation -> formula. An operation that isn't here has derivative 0, or no floating result."""


def _bell(f: Formulas, x: int) -> int:
    return f.times(f.op("exp", f.op("neg", f.op("mul", x, x))), 2.0 / math.sqrt(math.pi))
