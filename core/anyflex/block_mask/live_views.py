"""Live views: what a block mask has derived, found again by its tensors.

A compiled program hands an operation bare tensors. Those of a mask that is alive are its own
memory, where nothing else can be, so their address tells whose they are.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from torch import Tensor

from anyflex.block_mask.views import MaskViews

__all__ = ["add", "find"]

_live: WeakValueDictionary[object, MaskViews] = WeakValueDictionary()


def add(views: MaskViews) -> None:
    """Let views that a mask keeps be found, as long as it keeps them."""
    # Fake tensors and other subclasses have no address.
    if type(views.offsets) is Tensor and type(views.runs) is Tensor and not views.runs.is_meta:
        _live[_place(views.offsets, views.runs)] = views


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
        or (views.q_length, views.kv_length) != lengths
        or views.block_size != block_size
    ):
        return None
    return views


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.stride() == other.stride()


def _place(offsets: Tensor, runs: Tensor) -> object:
    return (
        offsets.device,
        *[
            # A tensor made under inference_mode counts no changes.
            (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
            for tensor in (offsets, runs)
        ],
    )
