"""Recorder of a kernel's calls to the device's runtime, beside computing on it.

Core has selected the device and the stream before a kernel runs, and the kernel synchronises
nothing. So a kernel has no reason to call the functions that are watched here, on any machine:
they are replaced for a while by ones that only note the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

__all__ = ["recorded"]

_KINDS = ("accelerator", "cuda", "xpu", "mps", "mtia")
_WATCHED = {
    "synchronize": "waits for the device",
    "default_stream": "asks for the default stream",
    "set_stream": "selects a stream",
    "stream": "selects a stream",
    "set_device": "selects a device",
    "set_device_index": "selects a device",
    "set_device_idx": "selects a device",
    "device": "selects a device",
    "device_index": "selects a device",
    "empty_cache": "empties the allocator's cache",
}


class _Nothing:
    """Result of a recorded function: it serves as a context, a stream or nothing."""

    cuda_stream = 0
    stream_id = 0

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def synchronize(self) -> None:
        return None


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Record the body's calls to any device's runtime, without making them.

    Yields:
        A sentence a call: ``"torch.cuda.synchronize() waits for the device"``.
    """
    calls: list[str] = []

    def recorder(kind: str, name: str, what: str) -> Any:
        def record(*arguments: Any, **named: Any) -> _Nothing:
            given = ", ".join(map(repr, arguments))
            calls.append(f"torch.{kind}.{name}({given}) {what}")
            return _Nothing()

        return record

    patches = [
        mock.patch.object(module, name, recorder(kind, name, what))
        for kind in _KINDS
        if (module := getattr(torch, kind, None)) is not None
        for name, what in _WATCHED.items()
        if hasattr(module, name)
    ]
    for patch in patches:
        patch.start()
    try:
        yield calls
    finally:
        for patch in reversed(patches):
            patch.stop()
