"""Integers of a graph that fit 32 bits, whatever the captured tensors hold.

Interval arithmetic on the sizes that a call's indices stay below. Values that depend on a captured
tensor of wide integers, or on a number that may change, aren't followed. Core's `int32_nodes`
knows more, but it reads values, which a compiled spec must not depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from anyflex.plugin import Node

__all__ = ["LIMITS", "WIDE_LIMITS", "Limits", "Range", "fits_int32", "ranges"]


class Range(NamedTuple):
    """low <= value <= high."""

    low: int
    high: int


class Limits(NamedTuple):
    """Upper bounds that a call must keep to: b, h below the first and q_idx, kv_idx below the
    second, offsets included, and captured tensors' last element within the third, in elements from
    the first."""

    heads: int
    length: int
    captured: int


LIMITS = Limits(1 << 16, 1 << 24, 1 << 31)
WIDE_LIMITS = Limits(1 << 62, 1 << 62, 1 << 62)

_PAST = 1 << 10
"""Lanes past the last column see indices up to this much higher."""


def fits_int32(found: Range | None) -> bool:
    return found is not None and found.low >= -(1 << 31) and found.high < 1 << 31


def ranges(nodes: Sequence[Node], limits: Limits) -> list[Range | None]:
    """Return each node's range; None where it isn't known, and for other types than integers.

    A range always lies inside the node's type: nothing in it has wrapped.
    """
    found: list[Range | None] = []
    for node in nodes:
        operands = [found[argument] for argument in node.arguments]
        guess = _range(nodes, node, operands, limits)
        whole = _whole(node.dtype)
        known = whole and guess and whole.low <= guess.low and guess.high <= whole.high
        found.append(guess if known else whole if node.dtype is not torch.int64 else None)
    return found


def _whole(dtype: torch.dtype) -> Range | None:
    if dtype is torch.bool:
        return Range(0, 1)
    if dtype.is_floating_point:
        return None
    limits = torch.iinfo(dtype)
    return Range(limits.min, limits.max)


def _range(
    nodes: Sequence[Node], node: Node, operands: list[Range | None], limits: Limits
) -> Range | None:
    if node.operation == "input":
        if node.attribute in ("b", "h"):
            return Range(0, limits.heads - 1)
        if node.attribute in ("q_idx", "kv_idx"):
            return Range(0, limits.length - 1 + _PAST)
        return None
    if node.operation == "const" and isinstance(node.attribute, int):
        return Range(int(node.attribute), int(node.attribute))
    if node.operation == "where":
        operands = operands[1:]
    rule = _RULES.get(node.operation)
    if rule is None or any(operand is None for operand in operands):
        return _bounded(nodes, node, operands)
    if node.operation == "cast" and nodes[node.arguments[0]].dtype.is_floating_point:
        return None
    return rule(*(operand for operand in operands if operand is not None))


def _bounded(nodes: Sequence[Node], node: Node, operands: list[Range | None]) -> Range | None:
    """Ranges of operations that bound their result although an operand isn't known."""
    if len(operands) != 2:
        return None
    x, y = operands
    if node.operation == "mod" and y is not None:
        return _modulo(y)
    if node.operation == "and":
        for side in (x, y):
            if side is not None and side.low >= 0:
                return Range(0, side.high)
    return None


def _modulo(y: Range) -> Range | None:
    return Range(min(y.low + 1, 0), max(y.high - 1, 0)) if y.low > 0 or y.high < 0 else None


def _corners(x: Range, y: Range, apply: Callable[[int, int], int]) -> Range:
    values = [apply(i, j) for i in x for j in y]
    return Range(min(values), max(values))


def _floordiv(x: Range, y: Range) -> Range | None:
    return _corners(x, y, lambda i, j: i // j) if y.low > 0 or y.high < 0 else None


def _fmod(x: Range, y: Range) -> Range | None:
    if not (y.low > 0 or y.high < 0):
        return None
    top = max(abs(y.low), abs(y.high)) - 1
    return Range(max(-top, min(x.low, 0)), min(top, max(x.high, 0)))


def _mod(x: Range, y: Range) -> Range | None:
    if x.low >= 0 and y.low > 0:
        return Range(0, min(x.high, y.high - 1))
    return _modulo(y)


def _and(x: Range, y: Range) -> Range | None:
    tops = [side.high for side in (x, y) if side.low >= 0]
    return Range(0, min(tops)) if tops else _joined(x, y)


def _joined(x: Range, y: Range) -> Range | None:
    """Range of or, xor, and: no result has more bits than the longer operand."""
    bits = max(max(end, ~end).bit_length() for side in (x, y) for end in side)
    return Range(0 if min(x.low, y.low) >= 0 else -(1 << bits), (1 << bits) - 1)


def _shl(x: Range, y: Range) -> Range | None:
    return _corners(x, y, lambda i, j: i << j) if y.low >= 0 and y.high < 32 else None


def _shr(x: Range, y: Range) -> Range | None:
    return Range(min(x.low, 0), max(x.high, 0))


def _abs(x: Range) -> Range:
    return Range(0 if x.low <= 0 <= x.high else min(map(abs, x)), max(map(abs, x)))


def _sign(x: Range) -> Range:
    return Range((x.low > 0) - (x.low < 0), (x.high > 0) - (x.high < 0))


_RULES: dict[str, Callable[..., Range | None]] = {
    "add": lambda x, y: Range(x.low + y.low, x.high + y.high),
    "sub": lambda x, y: Range(x.low - y.high, x.high - y.low),
    "mul": lambda x, y: _corners(x, y, lambda i, j: i * j),
    "neg": lambda x: Range(-x.high, -x.low),
    "abs": _abs,
    "sign": _sign,
    "minimum": lambda x, y: Range(min(x.low, y.low), min(x.high, y.high)),
    "maximum": lambda x, y: Range(max(x.low, y.low), max(x.high, y.high)),
    "floordiv": _floordiv,
    "mod": _mod,
    "fmod": _fmod,
    "and": _and,
    "or": _joined,
    "xor": _joined,
    "not": lambda x: Range(~x.high, ~x.low),
    "shl": _shl,
    "shr": _shr,
    "where": lambda x, y: Range(min(x.low, y.low), max(x.high, y.high)),
    "cast": lambda x: x,
    "detach": lambda x: x,
}
