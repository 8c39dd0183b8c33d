"""Places of a call's numbers in the buffers ``P`` (int64) and ``F`` (float32) of every kernel.

A tensor's strides don't travel with it: torch binds a buffer, with the storage offset alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from anyflex.plugin import Call
from anyflex_mps.lowering import MODS_AT

__all__ = ["Entry", "floats_of", "integers_of", "place", "strides_of"]

_SIZES = (
    "q_length", "kv_length", "batch", "heads", "mask_batch", "mask_head", "splits", "split_length",
    "row_plane", "elements", "batch_shift", "head_shift", "row_shift", "key_shift", "sequences",
    "most_rows", "most_keys", "pages", "table_height", "table_stride", "table_named",
    "first_group",
)  # fmt: skip
"""Entries that are one number each."""
_TENSORS = ("query", "key", "value", "out", "rest", "dout", "dq", "dk", "dv", "dlse")
"""Tensors whose four strides are entries, in elements; dlse has three dimensions."""
_AXES = ("batch", "head", "row", "column")
Entry = str | tuple[str, str]
"""Name of a number in ``P``: a size, or a tensor and the axis of its stride."""
_PLACES: dict[Entry, int] = {name: at for at, name in enumerate(_SIZES)} | {
    (name, axis): len(_SIZES) + 4 * number + at
    for number, name in enumerate(_TENSORS)
    for at, axis in enumerate(_AXES)
}
assert len(_PLACES) <= MODS_AT

_MOST_NUMBERS = 4096 // 8
"""Largest length of a list, whose bytes are at most 4096; more numbers come as a tensor."""


def place(name: str, axis: str | None = None) -> str:
    """Return the text of an entry: ``P[3]``.

    Args:
        name: a size, or a tensor whose stride is meant.
        axis: ``"batch"``, ``"head"``, ``"row"`` or ``"column"`` of a tensor.
    """
    return f"P[{_PLACES[name if axis is None else (name, axis)]}]"


def strides_of(**tensors: Tensor | None) -> dict[Entry, int]:
    """Return the entries of tensors' strides; absent tensors have none."""
    return {
        (name, axis): stride
        for name, tensor in tensors.items()
        if tensor is not None
        for axis, stride in zip(_AXES, tensor.stride(), strict=False)
    }


def integers_of(call: Call, entries: Mapping[Entry, int]) -> list[int] | Tensor:
    """Return ``P``: the entries, each captured tensor's sizes and strides, and the call's ints."""
    numbers = [0] * MODS_AT
    for entry, number in entries.items():
        numbers[_PLACES[entry]] = number
    for tensor in call.captured:
        numbers += [*tensor.shape, *tensor.stride()]
    numbers += call.ints
    if len(numbers) <= _MOST_NUMBERS:
        return numbers
    return torch.tensor(numbers, dtype=torch.int64, device=call.query.device)


def floats_of(call: Call) -> list[float] | Tensor:
    """Return ``F``: the scale, and the call's floats."""
    # torch takes a list's type from its first element, and a user's scale may be an int.
    numbers = [float(call.scale), *call.floats]
    if len(numbers) <= _MOST_NUMBERS:
        return numbers
    return torch.tensor(numbers, dtype=torch.float32, device=call.query.device)
