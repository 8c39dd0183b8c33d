"""Ranges of reads of captured tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anyflex.intervals.batched_bools import Flag, both, inverse
from anyflex.intervals.bounds import Range, Verdict, tensor_of
from anyflex.intervals.evaluation import Evaluation
from anyflex.intervals.floats import nan_where
from anyflex.mod_graph.evaluate import bounded_index
from anyflex.mod_graph.node import Node

__all__ = [
    "Extremes",
    "bounded_range",
    "fixed_row",
    "load_extremes",
    "load_range",
    "load_verdict",
]


@dataclass(frozen=True, slots=True)
class Extremes:
    """The smallest and largest value of a read in each cell.

    Args:
        low, high: of the captured tensor's type, bools as uint8.
        exact: they occur in the cell.
        inside: no index leaves the tensor.
    """

    low: Tensor
    high: Tensor
    exact: Flag
    inside: Flag


def load_range(evaluation: Evaluation, node: Node) -> Range | None:
    """Return the range of a read of numbers."""
    found = load_extremes(evaluation, node)
    if found is None:
        return None
    evaluation.must_stay_inside(found.inside)
    if node.dtype.is_floating_point:
        return nan_where(torch.zeros((), dtype=torch.bool, device="cpu"), found.low, found.high)
    low, high = found.low.to(torch.int64), found.high.to(torch.int64)
    if evaluation.static:
        return Range(int(low), int(high))
    return Range(low, high, low == high)


def load_verdict(evaluation: Evaluation, node: Node) -> Verdict:
    """Return the verdict of a read of bools."""
    found = load_extremes(evaluation, node)
    if found is None:
        return Verdict()
    evaluation.must_stay_inside(found.inside)
    if evaluation.static:
        return Verdict(bool(found.low > 0), bool(found.high == 0))
    # No verdict for a read outside: a dead element might be dead only because of it.
    true, false = both(found.low > 0, found.inside), both(found.high == 0, found.inside)
    mixed: Flag = False
    moving = [argument for argument in node.arguments if evaluation.moving(argument)]
    if len(moving) == 1:
        index = evaluation.range(moving[0])
        attained = False if index is None else index.attained
        # Both values are in the range, and every block reads the whole range.
        mixed = both(attained, found.exact, found.inside, inverse(true), inverse(false))
    return Verdict(true, false, mixed)


def load_extremes(evaluation: Evaluation, node: Node) -> Extremes | None:
    """Return the extremes of a read with at least one index that moves with q or kv, or None."""
    position = node.attribute
    assert isinstance(position, int)
    tables = evaluation.facts.tables
    tensor = tables.captured[position]
    if tensor.numel() == 0:
        evaluation.must_stay_inside(False)
        return None
    dimensions = [d for d, index in enumerate(node.arguments) if evaluation.moving(index)]
    ranges = [evaluation.range(node.arguments[d]) for d in dimensions]
    known = [r for r in ranges if r is not None]
    if evaluation.static or len(known) < len(ranges):
        evaluation.must_stay_inside(evaluation.static)  # where static, cells decide
        return Extremes(*tables.whole(position), False, False)
    lows, highs = [], []
    inside: Flag = True
    kept: Flag = True
    for d, range_ in zip(dimensions, known, strict=True):
        low, high, within, as_it_was = bounded_range(range_, tensor.shape[d])
        lows.append(low)
        highs.append(high)
        inside, kept = both(inside, within), both(kept, as_it_was)
    row, row_inside = fixed_row(evaluation, node, dimensions)
    smallest: Tensor
    exact: Flag = False
    if len(dimensions) == 1:
        table = tables.rows(position, dimensions[0])
        smallest, largest, exact = table.look_up(row, lows[0], highs[0])
    else:
        grid = tables.grid(position, (dimensions[0], dimensions[1])) if len(known) == 2 else None
        if grid is None:
            smallest, largest = tables.whole(position)
        else:
            smallest, largest = grid.look_up(row, (lows[0], lows[1]), (highs[0], highs[1]))
    return Extremes(smallest, largest, both(exact, kept), both(inside, row_inside))


def bounded_range(range_: Range, size: int) -> tuple[Tensor, Tensor, Flag, Flag]:
    """Return an index range inside 0..size-1.

    -size..-1 count from the end. A range that holds both kinds, or leaves the tensor, becomes the
    whole dimension.

    Returns:
        (low, high, no index leaves [-size, size), the range is unchanged).
    """
    low, high = tensor_of(range_.low), tensor_of(range_.high)
    least, most = int(low.amin()), int(high.amax())
    if least >= 0 and most < size:
        return low, high, True, True
    inside = (low >= -size) & (high < size)
    from_end = high < 0
    low, high = torch.where(from_end, low + size, low), torch.where(from_end, high + size, high)
    plain = (low >= 0) & (high < size)
    return torch.where(plain, low, 0), torch.where(plain, high, size - 1), inside, plain


def fixed_row(
    evaluation: Evaluation, node: Node, moving: Sequence[int]
) -> tuple[Tensor | int, Flag]:
    """Return the row that the indices which don't move choose, and where they are inside.

    Rows count through the dimensions not in `moving`, in order.
    """
    position = node.attribute
    assert isinstance(position, int)
    shape = evaluation.facts.tables.captured[position].shape
    row: Tensor | int = 0
    inside: Flag = True
    for dimension, argument in enumerate(node.arguments):
        if dimension not in moving:
            index, outside = bounded_index(evaluation.fixed(argument), shape[dimension])
            row = row * shape[dimension] + index
            if outside is not None:
                inside = both(inside, ~outside)
    return row, inside
