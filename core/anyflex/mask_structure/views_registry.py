"""Registry of the views that live block masks have derived, found by the mask's tensors.

A compiled program passes bare tensors to an operation. Without the registry each call would derive
the transpose of the same mask again.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from torch import Tensor

from anyflex.mask_structure.device_views import MaskViews
from anyflex.mask_structure.run_checks import holds_numbers

__all__ = ["find", "shared"]

_live: WeakValueDictionary[object, MaskViews] = WeakValueDictionary()


def shared(views: MaskViews) -> MaskViews:
    """Return the live views of the same memory, or else these, which are registered as long as a
    mask keeps them."""
    if not holds_numbers(views.offsets) or not holds_numbers(views.runs):
        return views
    sizes = (views.q_length, views.kv_length), views.block_size
    live = find(views.offsets, views.runs, *sizes)
    if live is None:
        _live[_place(views.offsets, views.runs)] = live = views
    return live


def find(
    offsets: Tensor, runs: Tensor, lengths: tuple[int, int], block_size: tuple[int, int]
) -> MaskViews | None:
    """Return the views of the mask that these tensors belong to, or None if it is gone, or if they
    are copies."""
    views = _live.get(_place(offsets, runs))
    if (
        views is not None
        # A mask's storage may have moved away from its address, and other tensors may be there
        # now.
        and views.offsets.is_set_to(offsets)
        and views.runs.is_set_to(runs)
        and ((views.q_length, views.kv_length), views.block_size) == (lengths, block_size)
    ):
        return views
    return None


def _place(offsets: Tensor, runs: Tensor) -> object:
    return offsets.device, offsets.data_ptr(), runs.data_ptr()
