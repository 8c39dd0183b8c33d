"""Ranges of floating operations.

Ends are computed in the node's own type. Rounding to nearest is monotone, so the bounds of sums,
products, roots and conversions hold unchanged; functions that torch computes approximately are
widened by a few units in the last place. A NaN bound means that the cell's range is unknown: every
comparison with it is False.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from anyflex.intervals.bounds import Range, tensor_of
from anyflex.intervals.evaluation import Evaluation
from anyflex.intervals.integers import ranged, where
from anyflex.mod_graph.dtypes import type_class
from anyflex.mod_graph.node import Node
from anyflex.mod_graph.operations import RECORDS
from anyflex.mod_graph.operations.bounds import Bounds

__all__ = ["FLOAT_RULES", "nan_where"]

Rule = Callable[[Evaluation, Node], Range | None]


def nan_where(unknown: Tensor, low: Tensor, high: Tensor) -> Range:
    """Return the range, with NaN bounds where it is unknown or a bound is NaN."""
    unknown = unknown | torch.isnan(low) | torch.isnan(high)
    return Range(torch.where(unknown, math.nan, low), torch.where(unknown, math.nan, high))


def _by_bounds(bounds: Bounds, *, infinite: bool = False) -> Rule:
    """Make a rule of a record's bounds.

    Args:
        infinite: whether it holds for operands with an infinite end. Others are not used: inside
            such ranges inf - inf and 0 * inf may occur.
    """

    def rule(evaluation: Evaluation, node: Node, operands: list[Range]) -> Range | None:
        ends = [tensor_of(end) for range_ in operands for end in range_[:2]]
        result = bounds(*ends)
        if result is None:
            return None
        low, high = map(tensor_of, result)
        if infinite:
            return Range(low, high)
        finite = functools.reduce(torch.logical_and, map(torch.isfinite, ends))
        return nan_where(~finite, low, high)

    return ranged(rule)


def _pow(evaluation: Evaluation, node: Node) -> Range | None:
    exponent = evaluation.nodes[node.arguments[1]]
    if exponent.operation != "const" or exponent.attribute != 2:
        return None
    return _SQUARE(evaluation, node)


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


def _square(a: Tensor, b: Tensor, *exponent: Tensor) -> tuple[Tensor, Tensor]:
    low, high = torch.maximum(a, -b).clamp(min=0), torch.maximum(a.abs(), b.abs())
    return low * low, high * high


_SQUARE = _by_bounds(_square)

FLOAT_RULES: dict[str, Rule] = {
    **{
        name: _by_bounds(record.bounds, infinite=name in ("minimum", "maximum"))
        for name, record in RECORDS.items()
        if record.bounds is not None and "float" in record.types
    },
    "pow": _pow,
    "cast": _cast,
    "where": where,
}
"""Operations without an entry, leaves and loads aside, have no range."""
