"""Live views: what a block mask has derived, found again by its tensors.

A compiled program hands an operation bare tensors. They are looked up by address, and are a
mask's where its tensors lie in the same storage and count as many changes. So a change of a mask
that an eager call would refuse is refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary, ref

from torch import Tensor

from anyflex.block_mask.watch import Watch
from anyflex.errors import BlockMaskError
from anyflex.mask_structure.device_views import MaskViews, changes
from anyflex.tensors.storage_checks import PLAIN
from anyflex.tensors.torch_versions import is_wrapped

__all__ = ["find", "holds_numbers", "shared", "watch"]

_live: WeakValueDictionary[object, MaskViews] = WeakValueDictionary()


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
        and live.changed() is None
        and _sizes(live) == _sizes(views)
    ):
        return live
    _live[place] = views
    return views


def holds_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has numbers at an address of its own: fake tensors, other subclasses and
    functorch's wrappers have not."""
    return type(tensor) in PLAIN and not tensor.is_meta and not is_wrapped(tensor)


def watch(views: MaskViews, values: Watch) -> None:
    """Let `find` check the captured tensors of a mask with these views, as long as the mask keeps
    its watch."""
    kept = [reference for reference in views.watches if reference() is not None]
    object.__setattr__(views, "watches", (*kept, ref(values)))


def find(
    offsets: Tensor,
    runs: Tensor,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    captured: Sequence[Tensor] = (),
) -> MaskViews | None:
    """Return the views of the mask that these tensors belong to, or None: it is gone, or they are
    copies.

    Args:
        captured: the mask mod's.

    Raises:
        BlockMaskError: the mask was changed in place after it was built, or what it was built
            from was.
    """
    views = _live.get(_place(offsets, runs))
    if (
        views is None
        # A mask's storage may have moved away from its address, and other tensors have come there.
        or not views.offsets.is_set_to(offsets)
        or not views.runs.is_set_to(runs)
        or _sizes(views) != (lengths, block_size)
    ):
        return None
    if (changes(offsets), changes(runs)) != views.changes:
        changed = views.changed()
        if changed is None:  # theirs is another count than the mask's
            return None
        raise BlockMaskError(
            f"{changed} of this block mask was changed in place after the mask was built: build "
            "the mask anew"
        )
    if captured and views.watches:
        _check_captured(views.watches, captured)
    return views


def _check_captured(watches: tuple[ref[Watch], ...], captured: Sequence[Tensor]) -> None:
    """Raise BlockMaskError if the masks that captured these tensors were all built from other
    values."""
    error = None
    for reference in watches:
        values = reference()
        if values is not None and values.is_of(captured):
            try:
                return values.check()
            except BlockMaskError as raised:
                error = raised
    if error is not None:
        raise error


def _sizes(views: MaskViews) -> tuple[tuple[int, int], tuple[int, int]]:
    return (views.q_length, views.kv_length), views.block_size


def _place(offsets: Tensor, runs: Tensor) -> object:
    return offsets.device, offsets.data_ptr(), runs.data_ptr()
