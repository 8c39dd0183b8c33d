"""Registry of the views that block masks have derived, found by the mask's tensors.

A compiled program passes bare tensors to an operation. Without the registry each call would derive
the transpose of the same mask again. A mask that was built outside of the program is found by the
memory of its tensors, as long as it is alive. One that was built inside has a mark, a digest of
its content: its memory is the program's, which writes it again without a trace.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from anyflex.mask_structure.device_views import MaskViews
from anyflex.mask_structure.run_checks import holds_numbers
from anyflex.process.fork_safe_locks import free_in_child

__all__ = ["find", "find_marked", "marked", "shared"]

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


_MARKED = 32
"""Maximum number of marked views that are kept, for the next layer, backward and the next step.
Evicts the longest unused; a mask whose views are gone is compared and checked anew."""

_marked: dict[tuple[int, ...], MaskViews] = {}

_lock = threading.Lock()
free_in_child(sys.modules[__name__])


def marked(views: MaskViews) -> tuple[MaskViews, Tensor]:
    """Return the kept views of this content, these or earlier ones, and their mark: int64 [2] on
    the CPU, equal for equal content in any process.

    Args:
        views: on the CPU, and of memory that nobody writes to.
    """
    digest = hashlib.blake2b(digest_size=16)
    sizes = (views.shape, views.q_length, views.kv_length, views.block_size)
    digest.update(repr(sizes).encode())
    for tensor in (views.offsets, views.runs):
        tensor = tensor.contiguous()
        digest.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    number = digest.digest()
    halves = (number[:8], number[8:])
    key = tuple(int.from_bytes(half, "little", signed=True) for half in halves)
    with _lock:
        views = _marked.pop(key, views)
        _marked[key] = views
        while len(_marked) > _MARKED:
            del _marked[next(iter(_marked))]
    return views, torch.tensor(key, dtype=torch.int64, device="cpu")


def find_marked(
    mark: Tensor, offsets: Tensor, lengths: tuple[int, int], block_size: tuple[int, int]
) -> MaskViews | None:
    """Return the views that have this mark, on the CPU, or None if they are gone or don't fit."""
    key = tuple(mark.tolist())
    with _lock:
        views = _marked.pop(key, None)
        if views is None:
            return None
        _marked[key] = views
    sizes = (tuple(offsets.shape), (views.q_length, views.kv_length), views.block_size)
    return views if sizes == (views.shape, lengths, block_size) else None
