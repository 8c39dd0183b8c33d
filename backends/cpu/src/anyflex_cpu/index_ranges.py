"""Integers of a graph that fit 32 bits, whatever the captured tensors hold.

They follow from the sizes that a call's indices stay below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from anyflex.plugin import IntegerRange, Node, integer_ranges

__all__ = ["LIMITS", "WIDE_LIMITS", "Limits", "fits_int32", "ranges"]


class Limits(NamedTuple):
    """Bounds that a call must keep to: b, h below the first and q_idx, kv_idx below the second,
    offsets included, captured tensors' last element within the third, in elements from the first,
    and no index below the last."""

    heads: int
    length: int
    captured: int
    lowest: int = 0


LIMITS = Limits(1 << 16, 1 << 24, 1 << 31)
# The first position of a packed sequence may be negative.
WIDE_LIMITS = Limits(1 << 62, 1 << 62, 1 << 62, -(1 << 62))

_PAST = 1 << 10
"""Lanes past the last column see indices up to this much higher."""


def fits_int32(found: IntegerRange | None) -> bool:
    return found is not None and found.low >= -(1 << 31) and found.high < 1 << 31


def ranges(nodes: Sequence[Node], limits: Limits) -> list[IntegerRange | None]:
    """Return each node's range; None where it isn't known, and for other types than integers."""
    heads = IntegerRange(limits.lowest, limits.heads - 1)
    length = IntegerRange(limits.lowest, limits.length - 1 + _PAST)
    inputs = {"b": heads, "h": heads, "q_idx": length, "kv_idx": length}
    return integer_ranges(nodes, inputs)
