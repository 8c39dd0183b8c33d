"""Python's collector of reference cycles, paused while code is loaded or compiled.

Both allocate many objects that stay. Python takes that for garbage that piles up and walks through
all objects of the process, of which torch alone has hundreds of thousands: a tenth of a second and
more each time, as long as loading a backend takes else, and nothing to be found.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator

from anyflex.process.fork_safe_locks import free_in_child

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
    entered = False
    try:
        with _lock:
            _pauses += 1
            entered = True
            if _pauses == 1:
                _was_on = gc.isenabled()
                gc.disable()
        yield
    finally:
        if entered:
            with _lock:
                _pauses -= 1
                if _pauses <= 0:
                    _resume()


def _resume() -> None:
    global _pauses, _was_on
    _pauses = 0
    if _was_on:
        gc.enable()
        # After it: another thread may fork in between, and the child comes here too.
        _was_on = False


if hasattr(os, "register_at_fork"):
    # The threads whose pauses these were don't exist there.
    os.register_at_fork(after_in_child=_resume)
