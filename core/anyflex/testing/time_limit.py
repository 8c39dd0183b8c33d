"""Time limit of a case.

Code that hangs in a kernel can't be stopped, so the process ends. A thread prints the running case
and writes the report. Native code that never lets another Python thread run blocks that thread
too: some seconds later faulthandler, which needs no interpreter, writes the tracebacks and ends
the process with the same status.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["GRACE", "ended_after", "limited"]

T = TypeVar("T")

GRACE = 10.0
"""Seconds that the thread has before faulthandler ends the process."""
_STATUS = 1
"""Exit status of faulthandler, and of a case that failed."""


def limited(name: str, work: Callable[[], T], seconds: float, expired: Callable[[], None]) -> T:
    """Return the result of `work`, or end the process with status 1 after `seconds`.

    Args:
        name: appears as a function's name in the tracebacks that are written to stderr then.
        work: the function that may hang.
        seconds: 0 for no limit.
        expired: is called in another thread before the process ends.
    """
    if not seconds:
        return work()

    call = _named(name, work)
    timer = threading.Timer(seconds, _end, (expired,))
    timer.daemon = True
    stderr = sys.__stderr__
    if stderr is not None:
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=stderr)
    timer.start()
    try:
        return call()
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def ended_after(name: str, work: Callable[[], T], seconds: float) -> T:
    """Return the result of `work`, or end the process after `seconds`, with status 1 and its
    tracebacks on stderr. For a process that another one watches and tells of.

    Args:
        name: appears in the tracebacks, as a function's name.
        work: the function that may hang.
        seconds: 0 for no limit.
    """
    if not seconds:
        return work()
    call = _named(name, work)
    stderr = sys.__stderr__
    if stderr is not None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=stderr)
    try:
        return call()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _named(name: str, work: Callable[[], T]) -> Callable[[], T]:
    def call() -> T:
        return work()

    # Where Python can't run any more, this line names the case.
    call.__code__ = call.__code__.replace(co_name=name)
    return call


def _end(expired: Callable[[], None]) -> None:
    try:
        expired()
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Neither sys.exit nor an exception reaches the hanging thread.
        os._exit(_STATUS)
