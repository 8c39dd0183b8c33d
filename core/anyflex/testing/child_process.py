"""Child processes: a fork of this one, and one that starts fresh."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

from anyflex.tensors import stand_in
from anyflex.testing.session import ConformanceFailure, Session

__all__ = [
    "FORK_SECONDS",
    "forked",
    "forks_autograd",
    "fresh",
    "killed_by",
    "needs_fork",
    "what_to_open",
    "why_not_fresh",
]

FORK_SECONDS = 30.0
"""Time limit in seconds: kernels compiled before the fork take moments, so a longer run hangs."""
_SECONDS = 120
_MARK = "anyflex-conformance-answer "

_START = (
    "import json, sys; task = json.load(sys.stdin); sys.path[:] = task['path']; "
    "from anyflex.testing.fresh_process import answer; "
    f"text = json.dumps(answer(task)); print(); print({_MARK!r} + text)"
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
        return f"the forked child {killed_by(os.WTERMSIG(status))}"
    return told.decode(errors="replace") or None


def killed_by(number: int) -> str:
    """Describe a signal in words."""
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        # Real-time signals have no names.
        return f"was killed by signal {number}"


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
    }


def fresh(session: Session, task: str, **details: Any) -> dict[str, Any]:
    """Start Python anew, carry a task of `anyflex.testing.fresh_process` out, return its answer.

    Raises:
        NotApplicable: a fresh process can't find the backend.
        ConformanceFailure: the process died or hung.
    """
    reason = why_not_fresh(session)
    session.needs(reason is None, str(reason))
    request = {
        "path": sys.path,
        "task": task,
        "threads": torch.get_num_threads(),
        **what_to_open(session),
        **details,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", _START],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConformanceFailure(f"a fresh process hung ({_SECONDS} s)") from error
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return answer
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    raise ConformanceFailure(f"a fresh process ended with {done.returncode}: {last[0]}")
