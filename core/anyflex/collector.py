"""Python's collector of reference cycles, paused while code is loaded or compiled.

Both allocate many objects that stay. Python takes that for garbage that piles up and walks through
all objects of the process, of which torch alone has hundreds of thousands: 0.15 s each time, half
of what loading a backend takes, and nothing to be found.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator

from anyflex.forking import free_in_child

__all__ = ["collector_paused"]

_lock = threading.Lock()
free_in_child(sys.modules[__name__])
_pauses = 0
_was_on = False
"""Before the first of those pauses that last."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cycles within, in any thread. Where several pauses overlap, until the last ends.

    A collector that was off before stays off.
    """
    global _pauses, _was_on
    with _lock:
        if _pauses == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses <= 0:
                _resume()


def _resume() -> None:
    global _pauses, _was_on
    _pauses = 0
    if _was_on:
        _was_on = False
        gc.enable()


if hasattr(os, "register_at_fork"):
    # The threads whose pauses these were don't exist there.
    os.register_at_fork(after_in_child=_resume)
