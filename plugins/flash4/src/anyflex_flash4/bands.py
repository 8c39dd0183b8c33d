"""Masks that FlashAttention-4 has as arguments: bands along the diagonal, proven from a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anyflex.plugin import FULL, PARTIAL, MaskViews, ModGraph, Node, simplify

__all__ = ["Band", "find_band", "follows"]

_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_FAR = 1 << 31
"""Larger than any index; sums of smaller numbers can't wrap."""


@dataclass(frozen=True)
class Band:
    """Pairs with ``lowest <= q_idx - kv_idx <= highest``; None means no bound."""

    lowest: int | None = None
    highest: int | None = None

    def __and__(self, other: Band) -> Band:
        lows = [low for low in (self.lowest, other.lowest) if low is not None]
        highs = [high for high in (self.highest, other.highest) if high is not None]
        return Band(max(lows, default=None), min(highs, default=None))

    def arguments(self) -> dict[str, object] | None:
        """FlashAttention-4's own arguments, for as many keys as queries; None where it has no such
        band."""
        # FlashAttention-4's bounds count from the diagonal, and a negative one means no bound.
        if (self.lowest or 0) > 0 or (self.highest is not None and self.highest < 0):
            return None
        if self.lowest == 0 and self.highest is None:
            return {"causal": True}
        right = None if self.lowest is None else -self.lowest
        return {"window_size_left": self.highest, "window_size_right": right}


def find_band(graph: ModGraph | None, ints: Sequence[int] = ()) -> Band | None:
    """Return the band that a mask's graph is, for all batches, heads and indices below 2^31; None
    where it is another mask, or no proof was found.

    Args:
        graph: of the mask.
        ints: values of its number slots.
    """
    if graph is None:
        return None
    graph = simplify(graph)
    return _band(graph.nodes, graph.output, ints)


def _band(nodes: Sequence[Node], position: int, ints: Sequence[int]) -> Band | None:
    node = nodes[position]
    if node.operation == "const" and node.attribute is True:
        return Band()
    if node.operation == "and":
        first, second = (_band(nodes, argument, ints) for argument in node.arguments)
        return None if first is None or second is None else first & second
    if node.operation not in _FLIPPED:
        return None
    left, right = (_linear(nodes, argument, ints) for argument in node.arguments)
    if left is None or right is None:
        return None
    q_idx, kv_idx, offset = (a - b for a, b in zip(left, right, strict=True))
    # sign * (q_idx - kv_idx) + offset compared with 0.
    if abs(q_idx) != 1 or kv_idx != -q_idx or abs(offset) >= _FAR:
        return None
    operation = node.operation if q_idx > 0 else _FLIPPED[node.operation]
    bound = -offset * q_idx
    return {
        "ge": Band(lowest=bound),
        "gt": Band(lowest=bound + 1),
        "le": Band(highest=bound),
        "lt": Band(highest=bound - 1),
    }[operation]


def _linear(
    nodes: Sequence[Node], position: int, ints: Sequence[int]
) -> tuple[int, int, int] | None:
    """(a, b, c) of a * q_idx + b * kv_idx + c, in int64, where nothing can wrap; else None."""
    node = nodes[position]
    if node.dtype is not torch.int64:
        return None
    if node.operation == "input":
        return {"q_idx": (1, 0, 0), "kv_idx": (0, 1, 0)}.get(str(node.attribute))
    if node.operation in ("const", "number"):
        number = node.attribute if node.operation == "const" else _slot(node, ints)
        assert isinstance(number, int)
        return (0, 0, number) if abs(number) < _FAR else None
    if node.operation not in ("add", "sub", "neg"):
        return None
    parts = [_linear(nodes, argument, ints) for argument in node.arguments]
    if None in parts:
        return None
    first = parts[0]
    assert first is not None
    second = parts[1] if len(parts) == 2 else first
    assert second is not None
    if node.operation == "neg":
        combined = tuple(-a for a in first)
    elif node.operation == "add":
        combined = tuple(a + b for a, b in zip(first, second, strict=True))
    else:
        combined = tuple(a - b for a, b in zip(first, second, strict=True))
    a, b, c = combined
    return (a, b, c) if max(abs(a), abs(b)) <= 2 and abs(c) < _FAR else None


def _slot(node: Node, ints: Sequence[int]) -> int:
    slot = str(node.attribute)
    # A float in an int64 node isn't a known band.
    return ints[int(slot[1:])] if slot[0] == "i" else _FAR


def follows(views: MaskViews, band: Band) -> bool:
    """Whether the structure lets through exactly the band's pairs, where PARTIAL blocks apply it:
    FULL blocks lie within the band, and those that are not listed outside of it.

    Reads the runs on the host.
    """
    kinds = views.on(torch.device("cpu")).dense()
    q_block, kv_block = views.block_size
    q_first = torch.arange(views.q_blocks, device="cpu").unsqueeze(1) * q_block
    kv_first = torch.arange(views.kv_blocks, device="cpu") * kv_block
    q_last = (q_first + q_block - 1).clamp(max=views.q_length - 1)
    kv_last = (kv_first + kv_block - 1).clamp(max=views.kv_length - 1)
    least, most = q_first - kv_last, q_last - kv_first
    low = -_FAR if band.lowest is None else band.lowest
    high = _FAR if band.highest is None else band.highest
    within = (least >= low) & (most <= high)
    without = (most < low) | (least > high)
    wrong = ((kinds == FULL) & ~within) | ((kinds != FULL) & (kinds != PARTIAL) & ~without)
    return not bool(wrong.any())
