"""Python's lock, where one thread compiles what will be needed while another compiles what is."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from anyflex.plugin import free_in_child

__all__ = ["INTERVAL", "often_given_back"]

INTERVAL = 0.0005
"""Seconds after which a thread lets another one have the lock that waits for it; Python's own are
0.005. A compilation lets go of it at each pass and each file, a hundred times: to wait that long
each time, for a thread that is in Python all the while, took it 0.3 of 2.8 s."""
_count = 0
_before = INTERVAL
_counts = threading.Lock()
free_in_child(sys.modules[__name__], "_counts")


@contextlib.contextmanager
def often_given_back() -> Iterator[None]:
    """While this lasts, in whichever threads, all give Python's lock back after `INTERVAL`,
    unless they did so sooner. Whoever sets another interval meanwhile keeps it."""
    global _count, _before
    with _counts:
        if not _count:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, INTERVAL))
        _count += 1
    try:
        yield
    finally:
        with _counts:
            _count -= 1
            if not _count and sys.getswitchinterval() == INTERVAL:
                sys.setswitchinterval(_before)
