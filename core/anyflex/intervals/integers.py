"""Ranges of integer operations.

Every function takes the evaluation and a node and returns a range that holds all values, or None
where it is unknown. None of them sees values that wrap: the analysis leaves such nodes out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch

from anyflex.intervals.batched_bools import Flag, both, either, inverse
from anyflex.intervals.bounds import Range, magnitude
from anyflex.intervals.evaluation import Evaluation
from anyflex.mod_graph.dtypes import type_class
from anyflex.mod_graph.node import Node
from anyflex.mod_graph.operations import RECORDS
from anyflex.mod_graph.operations.bounds import Bounds, choose, corners, greater, lesser

__all__ = ["INTEGER_RULES", "ranged", "where"]

Rule = Callable[[Evaluation, Node], Range | None]


def ranged(rule: Callable[[Evaluation, Node, list[Range]], Range | None]) -> Rule:
    """Make a rule from a function of the operands' ranges, which must all be known."""

    def by_node(evaluation: Evaluation, node: Node) -> Range | None:
        operands = []
        for argument in node.arguments:
            found = evaluation.range(argument)
            if found is None:
                return None
            operands.append(found)
        return rule(evaluation, node, operands)

    return by_node


def _is_point(range_: Range) -> Flag:
    low, high = range_.low, range_.high
    return True if low is high else low == high


def _by_bounds(bounds: Bounds, keeps_steps: int) -> Rule:
    """Make a rule of what a record says."""

    def rule(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range | None:
        found = bounds(*(end for range_ in operands for end in range_[:2]))
        if found is None:
            return None
        # Operands that one index moves take some pairs of their values only.
        free = keeps_steps > 0 and (len(operands) == 1 or evaluation.independent(*node.arguments))
        stepping, others = operands[:keeps_steps], operands[keeps_steps:]
        attained = both(free, *(range_.attained for range_ in stepping), *map(_is_point, others))
        return Range(*found, attained)

    return ranged(rule)


def _floordiv(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range | None:
    x, y = operands
    sure = either(y.low > 0, y.high < 0)
    if sure is False:
        return None
    least = choose(sure, y.low, 1)
    most = least if y.low is y.high else choose(sure, y.high, 1)
    low, high = corners(operator.floordiv, x.low, x.high, least, most)
    if sure is not True:
        # A divisor of 0 gives an arbitrary value; the evaluation divides by 1 instead.
        size = magnitude(x)
        low, high = choose(sure, low, -size), choose(sure, high, size)
    return Range(low, high, both(x.attained, _is_point(y), sure))


def _mod(evaluation: Evaluation, node: Node) -> Range | None:
    y = evaluation.range(node.arguments[1])
    if y is None:
        return None
    x = evaluation.range(node.arguments[0])
    # The remainder has the divisor's sign and is smaller; the evaluation takes a divisor of 0 as
    # 1.
    low, high = lesser(y.low + 1, 0), greater(y.high - 1, 0)
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


def _pow(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range | None:
    x, y = operands
    exponent = y.low
    if not isinstance(exponent, int) or exponent is not y.high or not 0 <= exponent <= 62:
        return None
    if exponent % 2:
        return Range(x.low**exponent, x.high**exponent)
    least = greater(greater(x.low, -x.high), 0)
    return Range(least**exponent, magnitude(x) ** exponent)


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


def where(evaluation: Evaluation, node: Node) -> Range | None:
    """Return the range of a selection, of floats too."""
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


INTEGER_RULES: dict[str, Rule] = {
    **{
        name: _by_bounds(bounds, record.keeps_steps)
        for name, record in RECORDS.items()
        if (bounds := record.integer_bounds or record.bounds) and "int" in record.types
    },
    "floordiv": ranged(_floordiv),
    "mod": _mod,
    "pow": ranged(_pow),
    "cast": _cast,
    "where": where,
}
"""Operations without an entry, leaves and loads aside, have no range."""
