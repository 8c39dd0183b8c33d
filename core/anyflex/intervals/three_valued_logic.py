"""Three-valued logic: comparisons and operations of bools whose values may be unknown."""

from __future__ import annotations

from collections.abc import Callable

import torch

from anyflex.intervals.batched_bools import Flag, both, either, inverse
from anyflex.intervals.bounds import Range, Verdict
from anyflex.intervals.evaluation import Evaluation
from anyflex.mod_graph.dtypes import type_class
from anyflex.mod_graph.node import Node
from anyflex.mod_graph.operations.logic import COMPARISONS

__all__ = ["BOOL_RULES"]

Rule = Callable[[Evaluation, Node, int], Verdict]


def _not(evaluation: Evaluation, node: Node, position: int) -> Verdict:
    true, false, mixed = evaluation.verdict(node.arguments[0])
    return Verdict(false, true, mixed)


def _and(evaluation: Evaluation, node: Node, position: int) -> Verdict:
    x = evaluation.verdict(node.arguments[0])
    if x.false is True:
        return x
    y = evaluation.verdict(node.arguments[1])
    return Verdict(
        both(x.true, y.true),
        either(x.false, y.false),
        either(both(x.mixed, y.true), both(y.mixed, x.true)),
    )


def _or(evaluation: Evaluation, node: Node, position: int) -> Verdict:
    x = evaluation.verdict(node.arguments[0])
    if x.true is True:
        return x
    y = evaluation.verdict(node.arguments[1])
    return Verdict(
        either(x.true, y.true),
        both(x.false, y.false),
        either(both(x.mixed, y.false), both(y.mixed, x.false)),
    )


def _xor(evaluation: Evaluation, node: Node, position: int) -> Verdict:
    x, y = (evaluation.verdict(argument) for argument in node.arguments)
    return Verdict(
        either(both(x.true, y.false), both(x.false, y.true)),
        either(both(x.true, y.true), both(x.false, y.false)),
        either(both(x.mixed, either(y.true, y.false)), both(y.mixed, either(x.true, x.false))),
    )


def _where(evaluation: Evaluation, node: Node, position: int) -> Verdict:
    c, x, y = (evaluation.verdict(argument) for argument in node.arguments)
    return Verdict(
        either(both(c.true, x.true), both(c.false, y.true), both(x.true, y.true)),
        either(both(c.true, x.false), both(c.false, y.false), both(x.false, y.false)),
        either(both(c.true, x.mixed), both(c.false, y.mixed)),
    )


def _cast(evaluation: Evaluation, node: Node, position: int) -> Verdict:
    (argument,) = node.arguments
    source = evaluation.nodes[argument].dtype
    if source is torch.bool:
        return evaluation.verdict(argument)
    if source.is_floating_point:
        found = evaluation.range(argument)
        if found is None:
            return Verdict()
        return _known(
            evaluation,
            either(found.low > 0, found.high < 0),
            both(found.low == 0, found.high == 0),
        )
    return _difference("ne", evaluation.range(argument))


def _comparison(evaluation: Evaluation, node: Node, position: int) -> Verdict:
    left, right = node.arguments
    kind = type_class(evaluation.nodes[left].dtype)
    if kind == "bool":
        return _bool_comparison(evaluation, node, position)
    if kind == "int":
        if node.operation in ("eq", "ne") and not evaluation.static:
            equality = evaluation.facts.equality(position)
            found = None if equality is None else equality.verdict(evaluation)
            if found is not None:
                true, false, mixed = found
                return found if node.operation == "eq" else Verdict(false, true, mixed)
        return _difference(node.operation, evaluation.difference(left, right))
    x, y = evaluation.range(left), evaluation.range(right)
    if x is None or y is None:
        return Verdict()
    if node.operation in ("gt", "ge"):
        x, y = y, x
    if node.operation in ("lt", "gt"):
        return _known(evaluation, x.high < y.low, x.low >= y.high)
    if node.operation in ("le", "ge"):
        return _known(evaluation, x.high <= y.low, x.low > y.high)
    equal = both(x.low == x.high, y.low == y.high, x.low == y.low)
    unequal = either(x.high < y.low, x.low > y.high)
    if node.operation == "eq":
        return _known(evaluation, equal, unequal)
    return _known(evaluation, unequal, equal)


def _known(evaluation: Evaluation, true: Flag, false: Flag) -> Verdict:
    # Where all cells share one range, its floating bounds are 0-d tensors; flags are bools there.
    return Verdict(bool(true), bool(false)) if evaluation.static else Verdict(true, false)


def _bool_comparison(evaluation: Evaluation, node: Node, position: int) -> Verdict:
    if node.operation in ("eq", "ne"):
        true, false, mixed = _xor(evaluation, node, position)
        return (
            Verdict(true, false, mixed) if node.operation == "ne" else Verdict(false, true, mixed)
        )
    x, y = (evaluation.verdict(argument) for argument in node.arguments)
    if node.operation in ("gt", "ge"):
        x, y = y, x
    if node.operation in ("lt", "gt"):  # x < y: not x and y
        return Verdict(both(x.false, y.true), either(x.true, y.false))
    return Verdict(either(x.false, y.true), both(x.true, y.false))


def _difference(operation: str, difference: Range | None) -> Verdict:
    """Return the verdict of ``x op y`` from the range of x - y."""
    if difference is None:
        return Verdict()
    low, high, attained = difference
    if operation in ("ge", "lt"):
        true, false = high < 0, low >= 0
    elif operation in ("le", "gt"):
        true, false = high <= 0, low > 0
    else:
        true, false = both(low == 0, high == 0), either(low > 0, high < 0)
    mixed = both(attained, inverse(true), inverse(false))
    if operation in ("ge", "gt", "ne"):
        true, false = false, true
    return Verdict(true, false, mixed)


BOOL_RULES: dict[str, Rule] = {
    "not": _not,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "where": _where,
    "cast": _cast,
    **{record.name: _comparison for record in COMPARISONS},
}
"""Rules of every operation with a bool result, leaves and loads aside."""
