"""Child processes: a fork of this one, and one that starts fresh: the parent's side."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from anyflex.tensors import stand_in
from anyflex.testing.answering import MARK
from anyflex.testing.session import ConformanceFailure, Session

__all__ = [
    "FORK_SECONDS",
    "FreshProcess",
    "forked",
    "forks_autograd",
    "fresh",
    "needs_fork",
    "what_to_open",
    "why_not_fresh",
]

FORK_SECONDS = 30.0
"""Time limit in seconds: kernels compiled before the fork take moments, so a longer run hangs."""
_SECONDS = 120
_END_SECONDS = 10.0
"""Time limit in seconds for the end of a process that was killed."""

# The channel is taken away first, because an import may print.
_START = (
    "import json, os, sys; channel = os.dup(0), os.dup(1); "
    "os.dup2(os.open(os.devnull, os.O_RDONLY), 0); os.dup2(2, 1); "
    "sys.path[:] = json.loads(sys.argv[1]); "
    "from anyflex.testing.answering import main; "
    "from anyflex.testing.{tasks} import TASKS; main(*channel, TASKS)"
)


def needs_fork(session: Session) -> None:
    """Skip the case where a forked child can't compute on the session's device."""
    session.needs(hasattr(os, "fork"), "this system has no fork")
    kind = session.device.type
    session.needs(kind == "cpu", f"torch can't use {kind} in a forked child")


def forks_autograd() -> bool:
    """Whether autograd that has run here runs in a forked child: torch refuses that where it keeps
    threads for an accelerator's sake."""
    return not torch.accelerator.is_available()


def forked(work: Callable[[], None]) -> str | None:
    """Run work in a forked child; return how it failed, or None.

    As in torch's own forked workers, torch's operations there use one thread.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns of forks of a process with threads: the case tests that such a child works.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _be_the_child(work, writing)
    os.close(writing)
    try:
        return _wait(pid, reading, time.monotonic() + FORK_SECONDS)
    finally:
        os.close(reading)


def _be_the_child(work: Callable[[], None], writing: int) -> None:
    try:
        torch.set_num_threads(1)
        work()
    except ConformanceFailure as error:
        os.write(writing, str(error).encode()[:60000])
    except BaseException:  # noqa: BLE001  all that happens here is told to the parent
        os.write(writing, traceback.format_exc(limit=-3).encode()[:60000])
    finally:
        # The child must not flush or clean up anything of the parent's.
        os._exit(0)


def _wait(pid: int, reading: int, deadline: float) -> str | None:
    told = b""
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "the forked child hung"
        part = os.read(reading, 65536)
        if not part:
            break
        told += part
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return f"the forked child {_killed_by(os.WTERMSIG(status))}"
    return told.decode(errors="replace") or None


def _killed_by(number: int) -> str:
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        # Real-time signals have no names.
        return f"was killed by signal {number}"


class FreshProcess:
    """A process that starts Python anew and answers questions, see `anyflex.testing.answering`.

    It has a session of its own: all processes that it starts are killed with it, and Ctrl-C goes
    to the parent.

    Args:
        tasks: module of `anyflex.testing` with the tasks.
    """

    def __init__(self, tasks: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", _START.format(tasks=tasks), json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        # Held while its end is waited for: afterwards another process may have its number.
        self._reaping = threading.Lock()

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """Return its answer, or None if it ends without one.

        Args:
            question: plain data.
            seconds: after which it is killed; 0 for never.
        """
        questions, answers = self._child.stdin, self._child.stdout
        assert questions is not None and answers is not None
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        if seconds:
            timer.start()
        try:
            questions.write(json.dumps(question).encode() + b"\n")
            questions.flush()
            line = next((line for line in answers if line.startswith(MARK)), b"")
        except OSError:
            # It ended before it read: `end` has the reason.
            return None
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            return None
        answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
        return answer

    def kill(self) -> None:
        """Kill it and the processes that it has started."""
        with self._reaping:
            if self._child.returncode is not None:
                return
            if not hasattr(os, "killpg"):
                self._child.kill()
                return
            # macOS raises the second for a group without running processes.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def end(self) -> str:
        """Kill it, and describe how it ended."""
        self.kill()
        with self._reaping:
            try:
                status = self._child.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                # It waits in the kernel, for example for a device, where no signal reaches it.
                return "was killed and doesn't end"
        for channel in (self._child.stdin, self._child.stdout):
            # Closing writes what is left, which a process that has ended can't read.
            with contextlib.suppress(OSError):
                if channel is not None:
                    channel.close()
        return f"ended with exit status {status}" if status >= 0 else _killed_by(-status)


def why_not_fresh(session: Session) -> str | None:
    """Return why a fresh process can't find the backend, or None."""
    module, _, name = session.target.partition(":")
    if module == "__main__" or "<locals>" in name:
        return f"{session.target} can't be imported by another process"
    return None


def what_to_open(session: Session) -> dict[str, Any]:
    """Return the arguments that another process needs to open the same session, as plain data."""
    return {
        "name": session.name,
        "device": str(session.device),
        "target": session.target,
        "installed": session.installed,
        "posed": stand_in.posed_in_force(),
        "threads": torch.get_num_threads(),
    }


def fresh(session: Session, task: str, **details: Any) -> dict[str, Any]:
    """Start Python anew, carry a task of `anyflex.testing.fresh_process` out, return its answer.

    Raises:
        NotApplicable: a fresh process can't find the backend.
        ConformanceFailure: the process died or hung.
    """
    reason = why_not_fresh(session)
    session.needs(reason is None, str(reason))
    process = FreshProcess("fresh_process")
    try:
        answer = process.ask({"task": task, **what_to_open(session), **details}, _SECONDS)
    finally:
        how = process.end()
    if answer is None:
        raise ConformanceFailure(
            f"a fresh process {how}, without an answer within {_SECONDS} s: what it said is on "
            "stderr"
        )
    return answer
