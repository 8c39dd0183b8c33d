"""Triton's checksum of its own files, which is part of each kernel's key in its cache on disk:
told by its wheel's list of them.

To compute it takes 0.4 to 0.7 s of a process's first call, nearly all of it for one library of 400
MB. But a wheel's list of files (RECORD, PEP 376 and 427) has a checksum of each, of the same kind.
The value is the same, so that kernels are found that others have compiled, and the reverse.
"""

from __future__ import annotations

import base64
import csv
import os
from functools import lru_cache
from importlib.metadata import Distribution, distribution
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

__all__ = ["recorded_checksum", "take_recorded_checksum"]


def take_recorded_checksum() -> None:
    """Let Triton have its checksum at once. Where its wheel's list doesn't tell it, it is
    computed, now rather than when the first kernel is compiled."""
    from triton.runtime import cache

    # Not every Triton has it there.
    checksum = getattr(cache, "triton_key", None)
    if checksum is None:
        return
    found = recorded_checksum()
    if found is None:
        checksum()
    else:
        # As it was: a function that computes it once.
        cache.triton_key = lru_cache(lambda: found)


def recorded_checksum() -> str | None:
    """Return what ``triton.runtime.cache.triton_key`` computes, or None where that can't be told
    without reading all files: Triton was built in place, comes in a wheel of another name, or by
    its size or time one of them has been changed since it was installed."""
    try:
        from triton.runtime import cache

        compute: Any = cache.triton_key.__wrapped__
        record = _Record(distribution("triton"))
        # Triton's own function decides which files these are, and in which order.
        names = {**compute.__globals__, "open": record.open, "hashlib": record}
        return str(FunctionType(compute.__code__, names)())
    except Exception:  # noqa: BLE001  it may be another function than this project knows
        return None


class _UnknownError(Exception):
    """The record doesn't say what a file has in it."""


class _Digest(str):
    """Of a file: its SHA-256, in hexadecimal digits."""


class _Record:
    """The list of files of an installed wheel, as what reads files and as ``hashlib``."""

    def __init__(self, installed: Distribution) -> None:
        text = installed.read_text("RECORD")
        if text is None:
            raise _UnknownError
        self._root = Path(str(installed.locate_file("")))
        self._lines = {line[0]: line[1:] for line in csv.reader(text.splitlines()) if line}
        # It lists itself.
        itself = next(name for name in self._lines if name.endswith(".dist-info/RECORD"))
        self._written = os.stat(self._root / itself).st_mtime_ns

    def open(self, path: str | os.PathLike[str], mode: str) -> _Unread:
        """As the function, for reading what isn't read."""
        hashed, size = self._lines[Path(path).relative_to(self._root).as_posix()][:2]
        kind, _, digits = hashed.partition("=")
        digest = base64.urlsafe_b64decode(digits + "=")
        facts = os.stat(path)
        if (kind, len(digest), facts.st_size) != ("sha256", 32, int(size)):
            raise _UnknownError
        if facts.st_mtime_ns > self._written:
            raise _UnknownError
        return _Unread(_Digest(digest.hex()))

    def sha256(self, content: object = None) -> Any:
        """As ``hashlib.sha256``, of a file that is `open`ed here, all at once."""
        told = [] if content is None else [content]

        def digest() -> str:
            (found,) = told
            if not isinstance(found, _Digest):
                raise _UnknownError
            return found

        return SimpleNamespace(update=told.append, hexdigest=digest)


class _Unread:
    """An open file, whose content is its digest, once."""

    def __init__(self, digest: str) -> None:
        self._left = digest

    def __enter__(self) -> _Unread:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def read(self, size: int = -1) -> str:
        """All of it."""
        found, self._left = self._left, ""
        return found
