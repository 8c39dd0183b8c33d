"""Live views: what a block mask has derived, found again by its tensors.

A compiled program hands an operation bare tensors. They are looked up by address and count of
changes, and are a mask's where its tensors lie in the same storage and count as many.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import Tensor

from anyflex.block_mask.views import MaskViews, changes

__all__ = ["find", "holds_numbers", "shared"]

_live: WeakValueDictionary[object, MaskViews] = WeakValueDictionary()
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def shared(views: MaskViews) -> MaskViews:
    """Return the live views of these very tensors, or else these, which can be found as long as a
    mask keeps them."""
    if not holds_numbers(views.offsets) or not holds_numbers(views.runs):
        return views
    place = _place(views.offsets, views.runs)
    live = _live.get(place)
    if (
        live is not None
        and live.offsets is views.offsets
        and live.runs is views.runs
        and _sizes(live) == _sizes(views)
    ):
        return live
    _live[place] = views
    return views


def holds_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has numbers at an address of its own: fake tensors, other subclasses and
    functorch's wrappers have not."""
    return type(tensor) is Tensor and not tensor.is_meta and not _is_wrapped(tensor)


def find(
    offsets: Tensor, runs: Tensor, lengths: tuple[int, int], block_size: tuple[int, int]
) -> MaskViews | None:
    """Return the views of the mask that these tensors belong to, or None: it is gone, or was
    changed in place, or they are copies."""
    views = _live.get(_place(offsets, runs))
    if (
        views is None
        or not _same(views.offsets, offsets)
        or not _same(views.runs, runs)
        or _sizes(views) != (lengths, block_size)
    ):
        return None
    return views


def _sizes(views: MaskViews) -> tuple[tuple[int, int], tuple[int, int]]:
    return (views.q_length, views.kv_length), views.block_size


def _same(one: Tensor, other: Tensor) -> bool:
    # A mask's storage may have moved away from its address, and other tensors have come there.
    return one.is_set_to(other) and changes(one) == changes(other)


def _place(offsets: Tensor, runs: Tensor) -> object:
    places = [(tensor.data_ptr(), changes(tensor)) for tensor in (offsets, runs)]
    return offsets.device, *places
