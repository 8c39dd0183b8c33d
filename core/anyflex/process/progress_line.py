"""Progress of long work, in one line of stderr."""

from __future__ import annotations

import time
from typing import TextIO

__all__ = ["ProgressLine"]

_COLUMNS = 79


class ProgressLine:
    """One line that is overwritten on a terminal; elsewhere a line every few seconds.

    Args:
        stream: usually ``sys.stderr``.
        seconds: between lines where there is no terminal; ``math.inf`` for none.
    """

    def __init__(self, stream: TextIO, seconds: float = 5.0) -> None:
        self._stream = stream
        self._seconds = seconds
        self._terminal = stream.isatty()
        self._last = time.monotonic()

    def show(self, text: str) -> None:
        """Show the progress of the work."""
        if self._terminal:
            self._stream.write("\r\x1b[K" + text[:_COLUMNS])
            self._stream.flush()
        elif time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        """Empty the line, so that something else can be printed."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
