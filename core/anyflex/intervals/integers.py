"""Ranges of integer operations.

Every function takes the evaluation and a node and returns a range that holds all values, or None
where it is unknown. None of them sees values that wrap: the analysis leaves such nodes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from anyflex.intervals.batched_bools import Flag, both, either, inverse
from anyflex.intervals.bounds import End, Range, choose, greater, hull, lesser, magnitude
from anyflex.intervals.evaluation import Evaluation
from anyflex.mod_graph.lowering import type_class
from anyflex.mod_graph.node import Node

__all__ = ["INTEGER_RULES"]

Rule = Callable[[Evaluation, Node], Range | None]


def _operands(evaluation: Evaluation, node: Node) -> list[Range] | None:
    found = [evaluation.range(argument) for argument in node.arguments]
    known = [range_ for range_ in found if range_ is not None]
    return known if len(known) == len(found) else None


def _ranged(rule: Callable[[Evaluation, Node, list[Range]], Range | None]) -> Rule:
    """Make a rule from a function of the operands' ranges, which must all be known."""

    def ranged(evaluation: Evaluation, node: Node) -> Range | None:
        operands = _operands(evaluation, node)
        return None if operands is None else rule(evaluation, node, operands)

    return ranged


def _is_point(range_: Range) -> Flag:
    low, high = range_.low, range_.high
    return True if low is high else low == high


def _add(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range:
    x, y = operands
    return Range(x.low + y.low, x.high + y.high)


def _sub(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range:
    x, y = operands
    return Range(x.low - y.high, x.high - y.low)


def _mul(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range:
    x, y = operands
    return Range(*hull(*(a * b for a in x[:2] for b in y[:2])))


def _neg(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range:
    (x,) = operands
    return Range(-x.high, -x.low, x.attained)


def _abs(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range:
    (x,) = operands
    low = greater(greater(x.low, -x.high), 0)
    return Range(low, magnitude(x), x.attained)


def _extreme(pick: Callable[[End, End], End]) -> Rule:
    def rule(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range:
        x, y = operands
        attained = both(x.attained, y.attained, evaluation.independent(*node.arguments))
        return Range(pick(x.low, y.low), pick(x.high, y.high), attained)

    return _ranged(rule)


def _floordiv(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range | None:
    x, y = operands
    sure = either(y.low > 0, y.high < 0)
    if sure is False:
        return None
    low_divisor, high_divisor = choose(sure, y.low, 1), choose(sure, y.high, 1)
    divisors = (low_divisor,) if y.low is y.high else (low_divisor, high_divisor)
    low, high = hull(*(a // b for a in x[:2] for b in divisors))
    if sure is not True:
        # A divisor of 0 gives an arbitrary value; the evaluation divides by 1 instead.
        most = magnitude(x)
        low, high = choose(sure, low, -most), choose(sure, high, most)
    return Range(low, high, both(x.attained, _is_point(y), sure))


def _mod(evaluation: Evaluation, node: Node) -> Range | None:
    y = evaluation.range(node.arguments[1])
    if y is None:
        return None
    x = evaluation.range(node.arguments[0])
    # The remainder has the divisor's sign and is smaller; the evaluation takes a divisor of 0 as
    # 1.
    low = choose(y.low > 0, 0, choose(y.low < 0, y.low + 1, 0))
    high = choose(y.high > 0, y.high - 1, 0)
    point = both(_is_point(y), y.low > 0)
    if point is False or x is None:
        return Range(low, high)
    divisor = choose(point, y.low, 1)
    quotient = x.low // divisor
    # Where the quotient is constant, the remainder moves as x does.
    same = both(point, quotient == x.high // divisor)
    start = quotient * divisor
    low, high = choose(same, x.low - start, low), choose(same, x.high - start, high)
    wide = both(x.attained, x.high - x.low + 1 >= divisor)
    covered = either(wide, evaluation.covers(node.arguments[0], y.low))
    attained = either(both(same, x.attained), both(inverse(same), point, covered))
    return Range(low, high, attained)


def _fmod(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range | None:
    x, y = operands
    most = greater(magnitude(y) - 1, 0)
    low = choose(x.low >= 0, 0, greater(-most, x.low))
    high = choose(x.high <= 0, 0, lesser(most, x.high))
    return Range(low, high)


def _pow(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range | None:
    x, y = operands
    exponent = y.low
    if not isinstance(exponent, int) or exponent is not y.high or not 0 <= exponent <= 62:
        return None
    if exponent % 2:
        return Range(x.low**exponent, x.high**exponent)
    least = greater(greater(x.low, -x.high), 0)
    return Range(least**exponent, magnitude(x) ** exponent)


def _bits_above(end: End) -> End:
    """Return the smallest 2^n - 1 that is not below `end`, which is not negative."""
    if isinstance(end, Tensor):
        # frexp, in fp64, is exact below 2^53; above, it may round up, which is sound too.
        _, exponent = torch.frexp(end.to(torch.float64))
        return (torch.ones_like(end) << exponent.to(torch.int64)) - 1
    return (1 << end.bit_length()) - 1


def _bitwise(name: str) -> Rule:
    def rule(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range | None:
        x, y = operands
        if name == "and":
            # A non-negative side bounds the result whatever the other is.
            top = greater(x.high, y.high)
            high = lesser(choose(x.low >= 0, x.high, top), choose(y.low >= 0, y.high, top))
            least = -_bits_above(greater(greater(-x.low, -y.low), 0)) - 1
            low = choose(either(x.low >= 0, y.low >= 0), 0, least)
        else:
            positive = both(x.low >= 0, y.low >= 0)
            top = _bits_above(greater(magnitude(x), magnitude(y)))
            low, high = choose(positive, 0, -top - 1), top
        point = both(_is_point(x), _is_point(y))
        if point is not False:
            value = {"and": _and, "or": _or, "xor": _xor}[name](x.low, y.low)
            low, high = choose(point, value, low), choose(point, value, high)
        return Range(low, high)

    return _ranged(rule)


def _and(a: End, b: End) -> End:
    return a & b


def _or(a: End, b: End) -> End:
    return a | b


def _xor(a: End, b: End) -> End:
    return a ^ b


def _not(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range:
    (x,) = operands
    return Range(~x.high, ~x.low, x.attained)


def _shift(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range | None:
    x, amount = operands
    width = torch.iinfo(node.dtype).bits
    by = amount.low
    if not isinstance(by, int) or by is not amount.high or not 0 <= by < width:
        return None
    if node.operation == "shl":
        return Range(x.low * (1 << by), x.high * (1 << by))
    return Range(x.low >> by, x.high >> by, x.attained)


def _sign(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range:
    (x,) = operands
    return Range(lesser(greater(x.low, -1), 1), lesser(greater(x.high, -1), 1))


def _cast(evaluation: Evaluation, node: Node) -> Range | None:
    (argument,) = node.arguments
    source = type_class(evaluation.nodes[argument].dtype)
    if source == "bool":
        verdict = evaluation.verdict(argument)
        attained = either(verdict.true, verdict.false, verdict.mixed)
        return Range(choose(verdict.true, 1, 0), choose(verdict.false, 0, 1), attained)
    x = evaluation.range(argument)
    if x is None or source == "int":
        return x
    # Rounds towards zero, so it is monotone. NaN, infinity and values beyond the type's range have
    # unspecified results, which the static pass has excluded for all cells.
    if evaluation.static:
        limits = torch.iinfo(node.dtype)
        low, high = float(x.low), float(x.high)
        if not (limits.min < low and high < limits.max):
            return None
        return Range(math.trunc(low), math.trunc(high))
    return Range(x.low.to(torch.int64), x.high.to(torch.int64))  # type: ignore[union-attr]


def _where(evaluation: Evaluation, node: Node) -> Range | None:
    condition, first, second = node.arguments
    verdict = evaluation.verdict(condition)
    if verdict.true is True:
        return evaluation.range(first)
    if verdict.false is True:
        return evaluation.range(second)
    x, y = evaluation.range(first), evaluation.range(second)
    if x is None or y is None:
        return None
    low, high = lesser(x.low, y.low), greater(x.high, y.high)
    low = choose(verdict.true, x.low, choose(verdict.false, y.low, low))
    high = choose(verdict.true, x.high, choose(verdict.false, y.high, high))
    attained = either(both(verdict.true, x.attained), both(verdict.false, y.attained))
    return Range(low, high, attained)


def _detach(evaluation: Evaluation, node: Node) -> Range | None:
    return evaluation.range(node.arguments[0])


INTEGER_RULES: dict[str, Rule] = {
    "add": _ranged(_add),
    "sub": _ranged(_sub),
    "mul": _ranged(_mul),
    "neg": _ranged(_neg),
    "abs": _ranged(_abs),
    "minimum": _extreme(lesser),
    "maximum": _extreme(greater),
    "floordiv": _ranged(_floordiv),
    "mod": _mod,
    "fmod": _ranged(_fmod),
    "pow": _ranged(_pow),
    "and": _bitwise("and"),
    "or": _bitwise("or"),
    "xor": _bitwise("xor"),
    "not": _ranged(_not),
    "shl": _ranged(_shift),
    "shr": _ranged(_shift),
    "sign": _ranged(_sign),
    "cast": _cast,
    "where": _where,
    "detach": _detach,
}
"""Operations without an entry, leaves and loads aside, have no range."""
