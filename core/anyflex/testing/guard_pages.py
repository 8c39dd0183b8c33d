"""Tensors whose memory begins or ends at a page that must not be touched."""

from __future__ import annotations

import ctypes
import mmap
from typing import Literal

import torch
from torch import Tensor

__all__ = ["at_guard_page"]

_NO_ACCESS = 0


def at_guard_page(tensor: Tensor, side: Literal["before", "after"]) -> Tensor:
    """Return a copy of a CPU tensor that ends at a guard page, or begins behind one.

    A read or write past that end kills the process: use it in forked children. The memory is never
    freed.

    Raises:
        OSError: the page can't be protected.
    """
    page = mmap.PAGESIZE
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = page if side == "before" else pages * page - size
    guard = 0 if side == "before" else pages * page
    copy = whole[begin : begin + size].view(tensor.dtype).reshape(tensor.shape)
    copy.copy_(tensor)
    # mmap can't protect a page.
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(whole.data_ptr() + guard)
    if libc.mprotect(address, ctypes.c_size_t(page), _NO_ACCESS) != 0:
        raise OSError(ctypes.get_errno(), "mprotect failed")
    return copy
