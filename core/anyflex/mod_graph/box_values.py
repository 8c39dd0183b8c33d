"""Proofs about values in a box of elements, as terms of a graph that computes them.

The rules for ranges of arithmetic are the bounds of the operations' records; rules here are those
of conversions, comparisons and bools.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from anyflex.mod_graph.node import Node
from anyflex.mod_graph.operations import RECORDS
from anyflex.mod_graph.operations.bounds import End, corners, greater
from anyflex.mod_graph.operations.terms import Term, call, where

__all__ = [
    "COMPARISONS",
    "LOGIC",
    "SMALL",
    "Range",
    "Verdict",
    "arithmetic",
    "cast_of_bools",
    "cast_of_numbers",
    "is_nonzero",
    "number_where",
]

_Bounds: TypeAlias = "Callable[..., tuple[Any, Any] | None]"
"""`anyflex.mod_graph.operations.bounds.Bounds`, of terms too."""

SMALL = 1 << 31
"""Indices of a box lie in -SMALL..SMALL-1. Other integers are tested to lie there where arithmetic
on them might wrap int64: sums and products of two that do don't."""

_DIVISIONS = ("floordiv", "mod", "fmod", "truediv")
_FINITE = ("add", "sub", "mul", "truediv")
"""Operations on floats that make NaN out of infinities."""


class Verdict(NamedTuple):
    """Proven values of a bool; at most one of them holds.

    Args:
        true, false: every element has this value.
    """

    true: Term
    false: Term


class Range(NamedTuple):
    """Bounds of a number.

    Args:
        low, high: inclusive ends; int64 for all integers, of the number's own type for floats,
            so that they round as the values do.
        known: every element's value lies in [low, high], and none is NaN.
        least, most: bounds of the ends where `known` holds, whatever the inputs are.
    """

    low: Term
    high: Term
    known: Term
    least: float
    most: float

    def if_known(self, *conditions: Term) -> Range:
        """Return the range with more conditions for its being known."""
        return self._replace(known=functools.reduce(Term.__and__, conditions, self.known))

    def inside(self, low: float, high: float) -> Range:
        """Return the range, known where it lies in low..high only."""
        if low <= self.least and self.most <= high:
            return self
        kept = self.if_known(self.low >= low, self.high <= high)
        return kept._replace(least=max(self.least, low), most=min(self.most, high))

    def ends(self) -> tuple[End | Term, End | Term]:
        """Return the ends, a constant integer's as Python ints, for a record's bounds."""
        node = self.low.builder.nodes[self.low.position]
        if self.low is self.high and node.operation == "const" and type(node.attribute) is int:
            return node.attribute, node.attribute
        return self.low, self.high


def _inverse(x: Verdict) -> Verdict:
    return Verdict(x.false, x.true)


def _both(x: Verdict, y: Verdict) -> Verdict:
    return Verdict(x.true & y.true, x.false | y.false)


def _either(x: Verdict, y: Verdict) -> Verdict:
    return Verdict(x.true | y.true, x.false & y.false)


def _differ(x: Verdict, y: Verdict) -> Verdict:
    return Verdict(
        (x.true & y.false) | (x.false & y.true), (x.true & y.true) | (x.false & y.false)
    )


def _bool_where(c: Verdict, x: Verdict, y: Verdict) -> Verdict:
    return Verdict(
        (c.true & x.true) | (c.false & y.true) | (x.true & y.true),
        (c.true & x.false) | (c.false & y.false) | (x.false & y.false),
    )


LOGIC: Mapping[str, Callable[..., Verdict]] = {
    "not": _inverse,
    "and": _both,
    "or": _either,
    "xor": _differ,
    "where": _bool_where,
    "cast": lambda x: x,
    "detach": lambda x: x,
    "eq": lambda x, y: _inverse(_differ(x, y)),
    "ne": _differ,
    "lt": lambda x, y: _both(_inverse(x), y),
    "le": lambda x, y: _either(_inverse(x), y),
    "gt": lambda x, y: _both(x, _inverse(y)),
    "ge": lambda x, y: _either(x, _inverse(y)),
}
"""Rules of operations on bools alone."""


def _less(x: Range, y: Range) -> Verdict:
    return Verdict(x.high < y.low, x.low >= y.high)


def _at_most(x: Range, y: Range) -> Verdict:
    return Verdict(x.high <= y.low, x.low > y.high)


def _equal(x: Range, y: Range) -> Verdict:
    one = x.low.test("eq", y.high) & x.high.test("eq", y.low)
    return Verdict(one, (x.high < y.low) | (x.low > y.high))


def _where_known(rule: Callable[[Range, Range], Verdict]) -> Callable[[Range, Range], Verdict]:
    def comparison(x: Range, y: Range) -> Verdict:
        true, false = rule(x, y)
        known = x.known & y.known
        return Verdict(true & known, false & known)

    return comparison


COMPARISONS: Mapping[str, Callable[[Range, Range], Verdict]] = {
    "lt": _where_known(_less),
    "le": _where_known(_at_most),
    "gt": _where_known(lambda x, y: _less(y, x)),
    "ge": _where_known(lambda x, y: _at_most(y, x)),
    "eq": _where_known(_equal),
    "ne": _where_known(lambda x, y: _inverse(_equal(x, y))),
}
"""Rules of comparisons of numbers."""


def is_nonzero(x: Range) -> Verdict:
    """Return the verdict of a number's conversion to bool."""
    zero = x.low.test("eq", 0) & x.high.test("eq", 0)
    return Verdict(((x.low > 0) | (x.high < 0)) & x.known, zero & x.known)


def cast_of_bools(x: Verdict, dtype: torch.dtype) -> Range:
    """Return the range of a bool's conversion to a number."""
    kept = dtype if dtype.is_floating_point else torch.int64
    always = x.true.beside(True)
    return Range(x.true.cast(kept), (~x.false).cast(kept), always, 0, 1)


def cast_of_numbers(x: Range, source: torch.dtype, dtype: torch.dtype) -> Range:
    """Return the range of a number's conversion to another type of numbers."""
    if dtype.is_floating_point:
        # Rounding is monotone; what overflows becomes infinite, and so does its bound.
        low, high = x.low.cast(dtype), x.high.cast(dtype)
        least, most = (-math.inf, math.inf) if source.is_floating_point else x[3:]
        return Range(low, high, x.known, least, most)
    limits = torch.iinfo(dtype)
    if not source.is_floating_point:
        return x if dtype is torch.int64 else x.inside(limits.min, limits.max)
    # Beyond the type's range, and for infinities, the value is arbitrary. Powers of two are exact,
    # or infinite, in all types.
    least, end = max(limits.min, -SMALL), min(limits.max + 1, SMALL)
    inside = x.if_known(x.low >= max(least, -torch.finfo(source).max), x.high < end)
    low, high = x.low.cast(torch.int64), x.high.cast(torch.int64)
    return Range(low, high, inside.known, least, end - 1)


def number_where(c: Verdict, x: Range, y: Range) -> Range:
    """Return the range of a selection between numbers."""
    return Range(
        where(c.true, x.low, where(c.false, y.low, call("minimum", x.low, y.low))),
        where(c.true, x.high, where(c.false, y.high, call("maximum", x.high, y.high))),
        (c.true & x.known) | (c.false & y.known) | (x.known & y.known),
        min(x.least, y.least),
        max(x.most, y.most),
    )


def arithmetic(node: Node, operands: Sequence[Range]) -> Range | None:
    """Return the range of an operation on numbers, or None where it has no rule.

    Args:
        operands: the ranges of its operands.
    """
    if node.operation == "mul" and node.arguments[0] == node.arguments[1]:
        bounds: _Bounds | None = _square_bounds
    elif node.dtype.is_floating_point:
        bounds = _float_bounds(node.operation)
    else:
        bounds = RECORDS[node.operation].integer_bounds or RECORDS[node.operation].bounds
    if bounds is None:
        return None
    if node.operation in _DIVISIONS:
        x, y = operands
        operands = x, y.if_known((y.low > 0) | (y.high < 0))
    elif node.operation in ("shl", "shr") and operands[1].least < operands[1].most:
        # A small integer times 2^31 stays below 2^63.
        operands = operands[0], operands[1].inside(0, 31 if node.operation == "shl" else 63)
    if node.dtype.is_floating_point:
        return _of_floats(node, bounds, operands)
    return _of_integers(node, bounds, operands)


def _of_integers(node: Node, bounds: _Bounds, operands: Sequence[Range]) -> Range | None:
    static = _static(node.operation, bounds, operands)
    if static is None:
        # The ends might wrap.
        operands = [operand.inside(-SMALL, SMALL - 1) for operand in operands]
        static = _static(node.operation, bounds, operands)
    ends = bounds(*(end for operand in operands for end in operand.ends()))
    if static is None or ends is None:
        return None
    limits = torch.iinfo(node.dtype)
    return _range(ends, operands, *static).inside(limits.min, limits.max)


def _of_floats(node: Node, bounds: _Bounds, operands: Sequence[Range]) -> Range | None:
    largest = torch.finfo(node.dtype).max
    if node.operation in _FINITE:
        operands = [operand.inside(-largest, largest) for operand in operands]
        size = math.inf
    else:
        # Rounding goes one further at most.
        size = max(abs(end) for operand in operands for end in operand[3:]) + 1
    ends = bounds(*(end for operand in operands for end in operand[:2]))
    return None if ends is None else _range(ends, operands, -size, size)


def _range(ends: tuple[Any, Any], operands: Sequence[Range], least: float, most: float) -> Range:
    known = functools.reduce(Term.__and__, (operand.known for operand in operands))
    low, high = (operands[0].low.beside(end) for end in ends)
    return Range(low, high, known, least, most)


def _static(operation: str, bounds: _Bounds, operands: Sequence[Range]) -> tuple[int, int] | None:
    """Return bounds that hold whatever the inputs are, or None where they leave int64."""
    ends = [int(end) for operand in operands for end in operand[3:]]
    if operation in _DIVISIONS and ends[2] <= 0 <= ends[3]:
        # The divisor isn't 0 where the range is known. 1 and -1 make the largest quotients.
        wide = (min(ends[2], -1), max(ends[3], 1))
        ends[2:] = (-1, 1) if operation == "floordiv" else wide
    found = bounds(*ends)
    if found is None:
        return None
    low, high = int(found[0]), int(found[1])
    return (low, high) if low >= -(1 << 63) and high < 1 << 63 else None


def _square_bounds(a: End, b: End, *same: End) -> tuple[End, End]:
    low, high = greater(greater(a, -b), 0), greater(b, -a)
    return low * low, high * high


def _float_bounds(operation: str) -> _Bounds | None:
    """Return the bounds of an operation that all targets round as torch does."""
    if operation in ("floor", "ceil", "round", "trunc"):
        return lambda a, b: (call(operation, a), call(operation, b))
    if operation == "truediv":
        return functools.partial(corners, operator.truediv)
    if operation in ("add", "sub", "mul", "neg", "abs", "minimum", "maximum", "sign"):
        return RECORDS[operation].bounds
    return None
