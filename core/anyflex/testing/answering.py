"""The loop of a fresh process, which answers questions of `child_process.FreshProcess`.

Cases may print and read freely, native code too: the process talks to its parent over copies of
stdin and stdout that nothing else knows. Stdout itself is redirected to stderr, since the parent's
may be the report, and stdin is empty.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["MARK", "Task", "main"]

Task = Callable[[dict[str, Any]], dict[str, Any]]
"""Function of a question that returns the answer, both plain data."""
MARK = b"anyflex-conformance-answer "
"""Prefix of an answer: code that Python runs at its start may have printed on the channel
before."""


def main(reading: int, writing: int, tasks: Mapping[str, Task]) -> None:
    """Answer the parent line by line, until it closes the channel or kills this process.

    Args:
        reading: file descriptor of the questions: a line of JSON each.
        writing: of the answers: lines of JSON behind `MARK`.
        tasks: by the name that is a question's ``"task"``.
    """
    faulthandler.enable()
    answers = os.fdopen(writing, "wb")
    try:
        for question in _questions(reading):
            told = tasks[question["task"]](question)
            answers.write(MARK + json.dumps(told).encode() + b"\n")
            answers.flush()
    except BaseException as error:  # noqa: BLE001  it is on stderr, and the parent tells of the end
        traceback.print_exc()
        # A case that ends its process has failed; the parent tells its status.
        status = error.code if isinstance(error, SystemExit) else 1
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: an interpreter that shuts down can't be told from one that hangs.
        os._exit(status if isinstance(status, int) else int(status is not None))


def _questions(reading: int) -> Iterator[Any]:
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        with os.fdopen(reading, "rb") as file:
            for line in file:
                lines.put(line)
        # The parent is gone. What a case does now may never end, nor what it has started.
        if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield json.loads(lines.get())
