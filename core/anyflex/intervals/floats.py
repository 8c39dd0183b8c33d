"""Ranges of floating operations.

Ends are computed in the node's own type. Rounding to nearest is monotone, so the bounds of sums,
products, roots and conversions hold unchanged; functions that torch computes approximately are
widened by a few units in the last place. A NaN bound means that the cell's range is unknown: every
comparison with it is False.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from anyflex.intervals.bounds import Range, tensor_of
from anyflex.intervals.evaluation import Evaluation
from anyflex.mod_graph.lowering import type_class
from anyflex.mod_graph.node import Node

__all__ = ["FLOAT_RULES", "nan_where"]

Rule = Callable[[Evaluation, Node], Range | None]
Ends = tuple[Tensor, Tensor]

_WIDENING = 8
"""Units in the last place by which torch's vector functions may stray from a monotone curve."""

_MONOTONE = "exp exp2 expm1 log log2 log10 log1p sinh asinh atan tanh sigmoid erf atanh"
_EXACT_MONOTONE = "floor ceil round trunc sign sqrt"


def nan_where(unknown: Tensor, low: Tensor, high: Tensor) -> Range:
    """Return the range, with NaN bounds where it is unknown or a bound is NaN."""
    unknown = unknown | torch.isnan(low) | torch.isnan(high)
    return Range(torch.where(unknown, math.nan, low), torch.where(unknown, math.nan, high))


def _rule(function: Callable[..., Ends]) -> Rule:
    """Make a rule of a function from the operands' ends to the result's.

    Operands with an infinite end are not used: inside such ranges inf - inf and 0 * inf may occur.
    """

    def rule(evaluation: Evaluation, node: Node) -> Range | None:
        ends: list[Tensor] = []
        for argument in node.arguments:
            found = evaluation.range(argument)
            if found is None:
                return None
            ends += [tensor_of(found.low), tensor_of(found.high)]
        low, high = function(*ends)
        finite = torch.isfinite(ends[0]) & torch.isfinite(ends[1])
        for end in ends[2:]:
            finite = finite & torch.isfinite(end)
        return nan_where(~finite, low, high)

    return rule


def _hull(*ends: Tensor) -> Ends:
    low = high = ends[0]
    for end in ends[1:]:
        low, high = torch.minimum(low, end), torch.maximum(high, end)
    return low, high


def _truediv(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Ends:
    low, high = _hull(a / c, a / d, b / c, b / d)
    sure = (c > 0) | (d < 0)
    return torch.where(sure, low, math.nan), torch.where(sure, high, math.nan)


def _abs(a: Tensor, b: Tensor) -> Ends:
    return torch.maximum(a, -b).clamp(min=0), torch.maximum(a.abs(), b.abs())


def _pow(evaluation: Evaluation, node: Node) -> Range | None:
    exponent = evaluation.nodes[node.arguments[1]]
    if exponent.operation != "const" or exponent.attribute != 2:
        return None
    return _SQUARE(evaluation, node)


def _wave(evaluation: Evaluation, node: Node) -> Range | None:
    return _rule(lambda a, b: (torch.full_like(a, -1), torch.full_like(b, 1)))(evaluation, node)


def _monotone(function: Callable[[Tensor], Tensor], exact: bool) -> Rule:
    def ends(a: Tensor, b: Tensor) -> Ends:
        low, high = function(a), function(b)
        if not exact:
            slack = _WIDENING * torch.finfo(low.dtype).eps
            least = torch.finfo(low.dtype).tiny
            low, high = low - low.abs() * slack - least, high + high.abs() * slack + least
        return low, high

    return _rule(ends)


def _tan(a: Tensor, b: Tensor) -> Ends:
    # Monotone between its poles only.
    inside = (a > -1.5) & (b < 1.5)
    return torch.where(inside, torch.tan(a), math.nan), torch.where(inside, torch.tan(b), math.nan)


def _cast(evaluation: Evaluation, node: Node) -> Range | None:
    (argument,) = node.arguments
    source = evaluation.nodes[argument]
    if type_class(source.dtype) == "bool":
        verdict = evaluation.verdict(argument)
        low, high = tensor_of(verdict.true), ~tensor_of(verdict.false)
        return Range(low.to(node.dtype), high.to(node.dtype))
    found = evaluation.range(argument)
    if found is None:
        return None
    # Rounding is monotone; a value that overflows becomes infinite, and so does its bound.
    low, high = (tensor_of(end).to(node.dtype) for end in found[:2])
    return Range(low, high)


def _where(evaluation: Evaluation, node: Node) -> Range | None:
    condition, first, second = node.arguments
    verdict = evaluation.verdict(condition)
    x, y = evaluation.range(first), evaluation.range(second)
    if verdict.true is True or verdict.false is True:
        return x if verdict.true is True else y
    if x is None or y is None:
        return None
    (a, b), (c, d) = (tuple(map(tensor_of, range_[:2])) for range_ in (x, y))
    true, false = tensor_of(verdict.true), tensor_of(verdict.false)
    low, high = torch.minimum(a, c), torch.maximum(b, d)
    return Range(
        torch.where(true, a, torch.where(false, c, low)),
        torch.where(true, b, torch.where(false, d, high)),
    )


def _detach(evaluation: Evaluation, node: Node) -> Range | None:
    return evaluation.range(node.arguments[0])


def _comparing(pick: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """Minimum and maximum: exact for infinities too."""

    def rule(evaluation: Evaluation, node: Node) -> Range | None:
        x, y = (evaluation.range(argument) for argument in node.arguments)
        if x is None or y is None:
            return None
        low, high = (pick(tensor_of(a), tensor_of(b)) for a, b in zip(x[:2], y[:2], strict=True))
        return Range(low, high)

    return rule


def _square(a: Tensor, b: Tensor, *exponent: Tensor) -> Ends:
    low, high = _abs(a, b)
    return low * low, high * high


_SQUARE = _rule(_square)

FLOAT_RULES: dict[str, Rule] = {
    "add": _rule(lambda a, b, c, d: (a + c, b + d)),
    "sub": _rule(lambda a, b, c, d: (a - d, b - c)),
    "mul": _rule(lambda a, b, c, d: _hull(a * c, a * d, b * c, b * d)),
    "truediv": _rule(_truediv),
    "neg": _rule(lambda a, b: (-b, -a)),
    "abs": _rule(_abs),
    "minimum": _comparing(torch.minimum),
    "maximum": _comparing(torch.maximum),
    "pow": _pow,
    "sin": _wave,
    "cos": _wave,
    "cast": _cast,
    "where": _where,
    "detach": _detach,
    **{name: _monotone(getattr(torch, name), exact=False) for name in _MONOTONE.split()},
    **{name: _monotone(getattr(torch, name), exact=True) for name in _EXACT_MONOTONE.split()},
    "tan": _rule(_tan),
}
"""Operations without an entry, leaves and loads aside, have no range."""
