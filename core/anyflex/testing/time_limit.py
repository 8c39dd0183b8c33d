"""Time limit of a case.

Code that hangs in a kernel can't be stopped, so the process ends. A thread prints the running case
and writes the report. Native code that never lets another Python thread run blocks that thread
too: some seconds later faulthandler, which needs no interpreter, writes the tracebacks and ends
the process with the same status.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["GRACE", "limited"]

T = TypeVar("T")

GRACE = 10.0
"""Seconds that the thread has before faulthandler ends the process."""
_STATUS = 1
"""Exit status of faulthandler, and of a case that failed."""


def limited(
    name: str,
    work: Callable[[], T],
    seconds: float,
    expired: Callable[[], None] | None = None,
) -> T:
    """Return the result of `work`, or end the process after `seconds`, with status 1 and its
    tracebacks on stderr.

    Args:
        name: appears as a function's name in the tracebacks.
        work: the function that may hang.
        seconds: 0 for no limit.
        expired: is called in another thread before the process ends; None where another process
            watches this one and tells of it.
    """
    if not seconds:
        return work()

    def call() -> T:
        return work()

    # Where Python can't run any more, this line names the case.
    call.__code__ = call.__code__.replace(co_name=name)
    stderr = sys.__stderr__
    if stderr is not None:
        grace = 0.0 if expired is None else GRACE
        faulthandler.dump_traceback_later(seconds + grace, exit=True, file=stderr)
    with contextlib.ExitStack() as stack:
        stack.callback(faulthandler.cancel_dump_traceback_later)
        if expired is not None:
            timer = threading.Timer(seconds, _end, (expired,))
            timer.daemon = True
            timer.start()
            stack.callback(timer.cancel)
        return call()


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
