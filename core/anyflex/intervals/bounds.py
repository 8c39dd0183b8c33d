"""Bounds of ranges: a Python int, exact at any size, or a tensor with one bound a cell.

Ends of integer ranges are ints or int64 tensors; ends of floating ranges are tensors of the node's
own type, so that they round as the values do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anyflex.intervals.batched_bools import Flag

__all__ = [
    "End",
    "Range",
    "Verdict",
    "choose",
    "greater",
    "hull",
    "lesser",
    "magnitude",
    "tensor_of",
]

End = int | Tensor


class Range(NamedTuple):
    """Every element's value lies in [low, high], and none is NaN.

    Args:
        low, high: inclusive ends.
        attained: in every block inside the cell, every integer of [low, high] occurs. Only this
            allows a conclusion that some element differs: ends may be rounded outwards.
    """

    low: End
    high: End
    attained: Flag = False


class Verdict(NamedTuple):
    """Known values of a bool in each cell; at most one of them holds.

    Args:
        true, false: the value of every element.
        mixed: every block inside the cell holds both a True and a False.
    """

    true: Flag = False
    false: Flag = False
    mixed: Flag = False


def lesser(a: End, b: End) -> End:
    """Return the smaller end."""
    if isinstance(a, Tensor):
        return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, Tensor) else min(a, b)


def greater(a: End, b: End) -> End:
    """Return the larger end."""
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)


def hull(*ends: End) -> tuple[End, End]:
    """Return the smallest and the largest."""
    low = high = ends[0]
    for end in ends[1:]:
        low, high = lesser(low, end), greater(high, end)
    return low, high


def choose(flag: Flag, a: End, b: End) -> End:
    """Return `a` where the flag holds, else `b`."""
    if isinstance(flag, Tensor):
        return torch.where(flag, a, b)
    return a if flag else b


def magnitude(range_: Range) -> End:
    """Return the largest absolute value."""
    return greater(range_.high, -range_.low)


def tensor_of(end: End) -> Tensor:
    """Return a bound, or a flag, as a tensor: on the CPU, whatever torch's default device is."""
    return end if isinstance(end, Tensor) else torch.tensor(end, device="cpu")
