"""Loading modules of kernels, in less than half of the time that it takes Triton and Python alone.

Triton's decorators ask `inspect` for the source of each function, and `inspect` makes tokens of it
to find its end: more than half of that time. These modules' functions end where indentation does.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from anyflex.plugin import collector_paused, free_in_child

__all__ = ["loading_kernels"]

_lock = threading.Lock()
free_in_child(sys.modules[__name__])
_here = threading.local()
"""`loads`: whether this thread is in one of the following."""
_loads = 0
_getblock: Any = inspect.getblock
"""Python's own."""
_replaced: Any = None
"""What was in its place before the first of the loads that last."""


@contextlib.contextmanager
def loading_kernels() -> Iterator[None]:
    """What this thread imports within is loaded so, and with Python's collector paused.

    Meanwhile `inspect.getblock` is a function of this module, which in other threads does what
    Python's does. A module's functions may be cut by it if they are at its top, and no line of
    their bodies, a string's or a comment's, begins at the margin: others have wrong sources.
    """
    global _loads, _replaced
    outer = getattr(_here, "loads", False)
    entered = False
    with collector_paused():
        try:
            with _lock:
                _loads += 1
                entered = True
                if _loads == 1:
                    _replaced = inspect.getblock
                    inspect.getblock = _block  # type: ignore[assignment]
            _here.loads = True
            yield
        finally:
            _here.loads = outer
            if entered:
                with _lock:
                    _loads -= 1
                    # Who has put another one there meanwhile may call this one from it.
                    if _loads == 0 and inspect.getblock is _block:
                        inspect.getblock = _replaced


def _block(lines: Sequence[str]) -> Sequence[str]:
    """The lines of the function with which `lines` begin."""
    end = _end(lines) if getattr(_here, "loads", False) else None
    return _getblock(lines) if end is None else lines[:end]


def _end(lines: Sequence[str]) -> int | None:
    """How many lines are the function's, or None where they don't begin with one at the margin."""
    end = None
    for index, line in enumerate(lines):
        if line.startswith("def ") and end is None:
            end = index + 1
        elif end is None:
            # A decorator, which may have several lines.
            if not line.startswith("@" if index == 0 else ("@", " ", ")")):
                return None
        elif line[0] in "\t]}":
            return None
        elif line[0] not in " \n)":
            break
        elif line != "\n":
            end = index + 1
    return end
