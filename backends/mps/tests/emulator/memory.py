"""Memory of a kernel's arguments: copies that end right before pages that fault."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Guarded", "Region", "regions_of"]

PAGE = mmap.PAGESIZE
GUARD = 16 << 20
"""Bytes of address space, before and after a buffer, in which every access faults."""
ALIGNMENT = 16
"""Largest alignment of a vector; a copy keeps the address of the original modulo this."""
IN_PLACE = 256 << 20
"""Bytes from which on a tensor's memory is bound as it is: huge strides over sparse memory."""
POISON = 0xFF
"""NaN for floats, -1 for integers."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_PRIVATE, _ANONYMOUS, _NORESERVE = 0x02, 0x20, 0x4000
_READ, _READ_WRITE = 0x1, 0x3


class Guarded:
    """Bytes between reserved pages: `bytes_` of them from the address `at`, right before a page
    that faults, or a few bytes off to keep `alignment_of` modulo ALIGNMENT."""

    def __init__(self, bytes_: int, alignment_of: int = 0) -> None:
        slack = -(alignment_of + bytes_) % ALIGNMENT
        pages = max(-(-(bytes_ + slack) // PAGE), 1) * PAGE
        self.size = pages + 2 * GUARD
        flags = _PRIVATE | _ANONYMOUS | _NORESERVE
        begin = _libc.mmap(None, self.size, 0, flags, -1, 0)
        if begin in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"no address space for a buffer of {bytes_} bytes")
        self.begin: int = begin
        _libc.mprotect(self.begin + GUARD, pages, _READ_WRITE)
        self.end = self.begin + self.size
        self.at = self.begin + GUARD + pages - bytes_ - slack
        self.bytes = bytes_
        self.slack = slack
        ctypes.memset(self.begin + GUARD, POISON, pages)

    def overrun(self) -> str | None:
        """Return where the bytes between the buffer and the guard pages were written to."""
        end, before = self.at + self.bytes, self.at - (self.begin + GUARD)
        if ctypes.string_at(end, self.slack) != bytes([POISON]) * self.slack:
            return "past the end"
        if ctypes.string_at(self.at - before, before) != bytes([POISON]) * before:
            return "before the begin"
        return None

    def protect(self) -> None:
        """Make every write fault."""
        _libc.mprotect(self.begin + GUARD, self.size - 2 * GUARD, _READ)

    def free(self) -> None:
        _libc.munmap(self.begin, self.size)


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    if tensor.numel() == 0:
        return 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size()


@dataclass
class Region:
    """Memory that one or several tensors share: their extents overlap.

    Attributes:
        begin: address of its first byte.
        end: address after its last byte.
        tensors: the tensors in it.
    """

    begin: int
    end: int
    tensors: list[torch.Tensor]
    guarded: Guarded | None = None
    live: torch.Tensor | None = None

    @property
    def at(self) -> int:
        """Address of the bytes that the kernel is given."""
        return self.begin if self.guarded is None else self.guarded.at

    def copy_in(self, *, read_only: bool) -> None:
        """Copy the elements of the tensors; what lies between is poison."""
        size = self.end - self.begin
        if size >= IN_PLACE:
            return
        self.guarded = Guarded(size, self.begin)
        if not size:
            return
        self._copy_elements(size)
        if read_only:
            self.guarded.protect()

    def _copy_elements(self, size: int) -> None:
        assert self.guarded is not None
        if any(_extent(t) == size and t.numel() * t.element_size() == size for t in self.tensors):
            ctypes.memmove(self.guarded.at, self.begin, size)
            return
        self.live = torch.zeros(size, dtype=torch.bool)
        for tensor in self.tensors:
            item = tensor.element_size()
            shape = (*tensor.shape, item)
            strides = (*(stride * item for stride in tensor.stride()), 1)
            self.live.as_strided(shape, strides, tensor.data_ptr() - self.begin).fill_(True)
        copy, original = _bytes_at(self.guarded.at, size), _bytes_at(self.begin, size)
        copy[self.live] = original[self.live]

    def copy_back(self) -> str | None:
        """Copy the tensors' elements back. Returns what else was written to, or None."""
        if self.guarded is None or not self.guarded.bytes:
            return None
        size = self.guarded.bytes
        if self.live is None:
            ctypes.memmove(self.begin, self.guarded.at, size)
        else:
            copy, original = _bytes_at(self.guarded.at, size), _bytes_at(self.begin, size)
            original[self.live] = copy[self.live]
            wrong = (copy != POISON) & ~self.live
            if wrong.any():
                at = int(wrong.int().argmax())
                return f"between the elements of a strided tensor: at byte {at}"
        return self.guarded.overrun()

    def free(self) -> None:
        if self.guarded is not None:
            self.guarded.free()
            self.guarded = None


def _bytes_at(address: int, size: int) -> torch.Tensor:
    array = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(array, dtype=torch.uint8)


def regions_of(tensors: Sequence[torch.Tensor]) -> list[Region]:
    """Return, for each tensor, its region: tensors whose extents overlap share one."""
    spans = [(t.data_ptr(), t.data_ptr() + _extent(t), i) for i, t in enumerate(tensors)]
    found: dict[int, Region] = {}
    last: Region | None = None
    for begin, end, i in sorted(spans):
        if last is None or begin >= last.end:
            last = Region(begin, end, [])
        last.end = max(last.end, end)
        last.tensors.append(tensors[i])
        found[i] = last
    return [found[i] for i in range(len(tensors))]
