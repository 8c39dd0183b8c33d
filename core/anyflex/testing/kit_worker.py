"""A process of `anyflex.testing.kit_pool`: opens the session, then runs the cases it is told.

Cases may print and read freely, native code too: the process talks to the pool over copies of
stdin and stdout that nothing else knows. Stdout itself is redirected to stderr, since the parent's
may be the report, and stdin is empty.
"""

from __future__ import annotations

import atexit
import dataclasses
import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO

import torch

from anyflex.errors import ArgumentError, BackendRefused, PluginError
from anyflex.testing.case_types import Case
from anyflex.testing.cases import every_case
from anyflex.testing.fresh_process import posed, registered
from anyflex.testing.runner import Outcome, run_cases
from anyflex.testing.session import Session, open_session
from anyflex.testing.time_limit import ended_after

__all__ = ["MARK", "device_lost", "main"]

MARK = b"anyflex-conformance-answer "
"""Prefix of an answer: code that Python runs at its start may have printed on the channel
before."""
_OPENING_ERRORS = (ArgumentError, BackendRefused, PluginError)


def main(reading: int, writing: int) -> None:
    """Answer the pool line by line, until it closes the channel.

    Args:
        reading: file descriptor of the questions: a line of JSON each.
        writing: of the answers: lines of JSON behind `MARK`.
    """
    faulthandler.enable()
    # Registered first, so it runs last at exit: the processes of cases have ended by then.
    atexit.register(_end_as_the_last, os.getpid())
    status = 1
    try:
        _serve(_Questions(os.fdopen(reading, "rb")), os.fdopen(writing, "wb"))
    except SystemExit as error:
        # A case that ends its process has failed; the pool tells its status.
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        traceback.print_exc()
    except BaseException:  # noqa: BLE001  it is on stderr, and the pool tells of the end
        traceback.print_exc()
    else:
        return
    # At once: an interpreter that shuts down can't be told from one that hangs.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def device_lost(device: torch.device) -> bool:
    """Return whether this process can't compute on its device any more.

    After some faults of a kernel, for example an access outside of memory, a device answers every
    call of the process with that fault, and only a new process can use it.
    """
    if device.type == "cpu":
        return False
    try:
        torch.accelerator.synchronize()
    except RuntimeError:
        return True
    return False


class _Questions:
    """Questions of the pool, with a check that the pool still exists.

    Attributes:
        busy: the pool waits for an answer.
    """

    def __init__(self, reading: BinaryIO) -> None:
        self.busy = True
        self._reading = reading
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def next(self) -> Any:
        """Return the next question, or None at the end."""
        line = self._lines.get()
        return json.loads(line) if line else None

    def _listen(self) -> None:
        for line in self._reading:
            self.busy = True
            self._lines.put(line)
        if self.busy:
            # The pool is gone, and the case may never end.
            _end_at_once()
        self._lines.put(b"")


def _end_as_the_last(pid: int) -> None:
    # A child that a case has forked inherits this.
    if os.getpid() == pid:
        sys.stdout.flush()
        sys.stderr.flush()
        _end_at_once()


def _end_at_once() -> None:
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        # Ends the processes that the case has started, too.
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _serve(questions: _Questions, writing: BinaryIO) -> None:
    def answer(**told: Any) -> None:
        questions.busy = False
        writing.write(MARK + json.dumps(told).encode() + b"\n")
        writing.flush()

    task = questions.next()
    with ExitStack() as stack:
        try:
            session = stack.enter_context(_opened(task))
        except _OPENING_ERRORS as error:
            kind = next(kind for kind in _OPENING_ERRORS if isinstance(error, kind))
            answer(error=kind.__name__, message=str(error))
            # The pool ends this process.
            questions.next()
            return
        cases = every_case()
        answer(ready=True)
        while (question := questions.next()) is not None:
            outcome = _outcome(session, cases[question["case"]], task)
            suspect = outcome.status not in ("passed", "refused", "skipped")
            answer(
                outcome=dataclasses.asdict(outcome),
                last=suspect and device_lost(session.device),
            )


@contextmanager
def _opened(task: dict[str, Any]) -> Iterator[Session]:
    # In the session torch's operations have one thread; this is the number from before.
    torch.set_num_threads(task["threads"])
    with ExitStack() as stack:
        stack.enter_context(posed(task))
        try:
            stack.enter_context(registered(task))
        except (ImportError, AttributeError) as error:
            raise ArgumentError(
                f"backend {task['name']!r} ({task['target']}) is registered in one process only, "
                f"and other processes don't find it ({type(error).__name__}: {error}): let its "
                "class stand in a module that can be imported, under its own name, or leave "
                "--jobs out"
            ) from error
        yield stack.enter_context(open_session(task["name"], task["device"]))


def _outcome(session: Session, case: Case, task: dict[str, Any]) -> Outcome:
    def run() -> Outcome:
        require = frozenset(task["require"])
        return next(run_cases(session, [case], require=require, expected=task["expected"]))

    return ended_after(case.name, run, task["seconds"])
