"""Ranges and verdicts of values in a cell.

Ends of integer ranges are ints or int64 tensors; ends of floating ranges are tensors of the node's
own type, so that they round as the values do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anyflex.intervals.batched_bools import Flag
from anyflex.mod_graph.operations.bounds import End, greater

__all__ = ["Range", "Verdict", "magnitude", "tensor_of"]


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


def magnitude(range_: Range) -> End:
    """Return the largest absolute value."""
    return greater(range_.high, -range_.low)


def tensor_of(end: End) -> Tensor:
    """Return a bound, or a flag, as a tensor: on the CPU, whatever torch's default device is."""
    return end if isinstance(end, Tensor) else torch.tensor(end, device="cpu")
