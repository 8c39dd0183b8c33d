"""Bounds of the integers that kernels compute with: sizes, and offsets inside of a head."""

from __future__ import annotations

from torch import Tensor

from anyflex.plugin import BackendRefused, Call
from anyflex_mps.lowering import LONGEST, MOST_HEADS

__all__ = ["check_sizes", "fits_int"]

_BOUNDS = {
    "the batch": MOST_HEADS,
    "the number of query heads": MOST_HEADS,
    "the number of query rows": LONGEST,
    "the number of keys": LONGEST,
}
"""Bounds of the indices that mods see, in the order of `Call.index_offsets`."""


def check_sizes(call: Call) -> None:
    """Raise BackendRefused where an index is beyond what the kernels' integers are made for."""
    keys = call.key.shape[2]
    if call.packed is not None:
        keys = max(keys, call.packed.max_kv)
    sizes = (*call.query.shape[:3], keys)
    for (name, most), size, offset in zip(_BOUNDS.items(), sizes, call.index_offsets, strict=True):
        if offset < 0 or size + offset > most:
            begin = f", from {offset} on," if offset else ""
            raise BackendRefused(
                f"backend 'mps': {name}{begin} is {size}, and its kernels count from 0 to "
                f"{most - 1}. Call it in parts, or use backend='reference'"
            )


def fits_int(tensor: Tensor) -> bool:
    """Return whether the offset of every element of a head fits int.

    Args:
        tensor: [B, H, rows, columns]; kernels add a head's own offset as long.
    """
    (rows, columns), (row, column) = tensor.shape[2:], tensor.stride()[2:]
    return (rows - 1) * row + (columns - 1) * column < 1 << 31
