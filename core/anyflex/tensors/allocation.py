"""Failed allocations, reported with their purpose and their size in bytes.

``torch.OutOfMemoryError`` of an accelerator, which users catch, passes unchanged everywhere. Other
allocators, above all the CPU's, raise plain RuntimeErrors that only their text tells from others.
"""

from __future__ import annotations

import re

import torch

from anyflex.errors import AllocationError

__all__ = ["failed_allocation"]

_FAILED = re.compile(
    r"tried to allocate|can't allocate|not enough memory|out of memory|"
    # Sizes whose product exceeds int64.
    r"size calculation overflowed|multiplication overflow",
    re.IGNORECASE,
)
_ASKED = re.compile(r"tried to allocate (\d+) bytes")
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def failed_allocation(doing: str, error: BaseException) -> AllocationError | None:
    """Return the error to raise where an allocation raised `error`, or None where that isn't a
    failed allocation.

    Args:
        doing: ``"backend 'cpu' ran out of memory in its kernel"``.
    """
    if not _is_failure(error):
        return None
    found = _ASKED.search(str(error))
    asked = f": {found[1]} bytes ({_readable(int(found[1]))}) were asked for" if found else ""
    failure = AllocationError(
        f"{doing}{asked}. Make the call smaller (batch, heads or lengths), or free memory."
    )
    failure.__cause__ = error
    return failure


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and _FAILED.search(str(error)) is not None


def _readable(size: int) -> str:
    """Return a size for people: ``"1.5 GiB"``."""
    number, unit = float(size), "bytes"
    for larger in _UNITS:
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.4g} {unit}"
