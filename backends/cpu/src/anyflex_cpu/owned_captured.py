"""Find captured tensors whose gradients have one writer an element: biases for each pair.

An element that every read of the tensor reaches by kv_idx, and by b or h, as they are, belongs to
one key of one batch entry or head. The native library then sums it once instead of once a thread.
"""

from __future__ import annotations

from typing import NamedTuple

from anyflex.plugin import Derivative

__all__ = ["NOTHING_OWNED", "Owned", "owned_captured"]

_BITS = {"b": 1, "h": 2}


class Owned(NamedTuple):
    """Args:
    tensors: positions of captured tensors.
    by: bits of what all of their reads are indexed by beside kv_idx: 1 b, 2 h.
    """

    tensors: frozenset[int]
    by: int


NOTHING_OWNED = Owned(frozenset(), 0)


def owned_captured(derivative: Derivative) -> Owned:
    """Return the tensors all of whose reads have kv_idx, as it is, among their indices."""
    reads: dict[int, set[str]] = {}
    for scatter in derivative.scatters:
        indices = {
            str(derivative.nodes[position].attribute)
            for position in scatter.indices
            if derivative.nodes[position].operation == "input"
        }
        reads.setdefault(scatter.captured, set(indices)).intersection_update(indices)
    owned = {position: names for position, names in reads.items() if "kv_idx" in names}
    by = sum(bit for name, bit in _BITS.items() if all(name in names for names in owned.values()))
    return Owned(frozenset(owned), by if owned else 0)
