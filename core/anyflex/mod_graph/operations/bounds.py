"""Arithmetic on bounds of ranges: Python ints, exact at any size, tensors with one bound a cell,
or terms, which are nodes of a graph that computes bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from anyflex.mod_graph.operations.terms import call, where

__all__ = [
    "Bounds",
    "End",
    "choose",
    "corners",
    "equal",
    "greater",
    "hull",
    "lesser",
    "rising",
    "sign_of",
]

End: TypeAlias = int | Tensor
"""Bound of a range. Functions of bounds take terms too (`anyflex.mod_graph.box_values`): they are
made of operators and of this module's functions, and constants come as ints."""
Bounds: TypeAlias = "Callable[..., tuple[End, End] | None]"
"""Function of (low, high) of each operand, all flat, that returns (low, high) of the result, or
None where it is unknown."""

_WIDENING = 8
"""Units in the last place by which torch's vector functions may stray from a monotone curve."""


def lesser(a: End, b: End) -> End:
    """Return the smaller end."""
    if isinstance(a, Tensor):
        return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)
    if isinstance(b, Tensor):
        return b.clamp(max=a)
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else call("minimum", a, b)


def greater(a: End, b: End) -> End:
    """Return the larger end."""
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)
    if isinstance(b, Tensor):
        return b.clamp(min=a)
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else call("maximum", a, b)


def equal(a: End, b: End) -> bool | Tensor:
    """Tell whether two ends are the same number."""
    if isinstance(a, (int, Tensor)) and isinstance(b, (int, Tensor)):
        return a == b
    return b.test("eq", a) if isinstance(a, int) else a.test("eq", b)


def hull(*ends: End) -> tuple[End, End]:
    """Return the smallest and the largest."""
    low = high = ends[0]
    for end in ends[1:]:
        low, high = lesser(low, end), greater(high, end)
    return low, high


def corners(apply: Callable[[Any, Any], Any], a: End, b: End, c: End, d: End) -> tuple[End, End]:
    """Return the hull of a function that is monotone in each of two operands, and that rises in
    the first where the second isn't negative, and falls where it is."""
    if c is d and isinstance(c, int):
        first, last = apply(a, c), apply(b, c)
        return (first, last) if c >= 0 else (last, first)
    seconds = (c,) if c is d else (c, d)
    return hull(*(apply(first, second) for first in (a, b) for second in seconds))


def choose(flag: bool | Tensor, a: End, b: End) -> End:
    """Return `a` where the flag holds, else `b`."""
    if isinstance(flag, Tensor):
        return torch.where(flag, a, b)
    if isinstance(flag, bool):
        return a if flag else b
    return where(flag, a, b)


def sign_of(end: End) -> End:
    """Return -1, 0 or 1."""
    if isinstance(end, Tensor):
        return torch.sign(end)
    return (end > 0) - (end < 0) if isinstance(end, int) else call("sign", end)


def rising(function: Callable[[Tensor], Tensor], *, exact: bool = False) -> Bounds:
    """Bounds of a function that rises everywhere: its values at the ends, widened unless torch
    computes it exactly."""

    def bounds(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        low, high = function(a), function(b)
        if exact:
            return low, high
        slack = _WIDENING * torch.finfo(low.dtype).eps
        least = torch.finfo(low.dtype).tiny
        return low - low.abs() * slack - least, high + high.abs() * slack + least

    return bounds
