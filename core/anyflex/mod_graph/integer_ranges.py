"""Ranges of a graph's integers and bools, whatever captured tensors and closed-over numbers hold.

Backends choose the width of integers by them: a compiled spec must not depend on values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from anyflex.mod_graph.node import Node
from anyflex.mod_graph.operations import RECORDS

__all__ = ["IntegerRange", "integer_ranges"]


class IntegerRange(NamedTuple):
    """low <= value <= high."""

    low: int
    high: int


def integer_ranges(
    nodes: Sequence[Node], inputs: Mapping[str, IntegerRange]
) -> list[IntegerRange | None]:
    """Return the range of each node; None for floats, and for int64 of which nothing is known.

    A range lies inside the node's type: nothing in it has wrapped.

    Args:
        nodes: of a graph or a derivative.
        inputs: range of each index, by its name.
    """
    found: list[IntegerRange | None] = []
    for node in nodes:
        if node.dtype.is_floating_point:
            found.append(None)
            continue
        whole = _whole(node.dtype)
        guess = _guess(nodes, node, found, inputs)
        if guess is None or guess.low < whole.low or guess.high > whole.high:
            guess = None if node.dtype is torch.int64 else whole
        found.append(guess)
    return found


def _whole(dtype: torch.dtype) -> IntegerRange:
    if dtype is torch.bool:
        return IntegerRange(0, 1)
    limits = torch.iinfo(dtype)
    return IntegerRange(limits.min, limits.max)


def _guess(
    nodes: Sequence[Node],
    node: Node,
    found: Sequence[IntegerRange | None],
    inputs: Mapping[str, IntegerRange],
) -> IntegerRange | None:
    if node.operation == "input":
        return inputs.get(str(node.attribute))
    if node.operation == "const":
        assert isinstance(node.attribute, int)
        return IntegerRange(int(node.attribute), int(node.attribute))
    operands = [found[argument] for argument in node.arguments]
    if node.operation in ("mod", "and"):  # either operand may bound the result
        operands = [
            range_ or _whole(nodes[argument].dtype)
            for argument, range_ in zip(node.arguments, operands, strict=True)
        ]
    elif node.operation == "where":
        operands = operands[1:]
    known = [range_ for range_ in operands if range_ is not None]
    if not known or len(known) < len(operands):
        return None
    if node.operation in ("cast", "detach", "where"):
        return IntegerRange(min(r.low for r in known), max(r.high for r in known))
    if node.operation in ("floordiv", "mod", "fmod") and known[1].low <= 0 <= known[1].high:
        return None  # a quotient by 0 is any number
    record = RECORDS[node.operation]
    bounds = record.integer_bounds or record.bounds
    ends = None if bounds is None else bounds(*(end for range_ in known for end in range_))
    if ends is None:
        return None
    low, high = ends
    assert isinstance(low, int) and isinstance(high, int)
    return IntegerRange(low, high)
