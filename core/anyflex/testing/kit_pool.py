"""The kit's cases in several processes at once: the parent's side.

`anyflex.testing.kit_worker` is the other.

Processes start fresh, since a forked one can't use the parent's device. Each takes the next case
when it has answered. One that ends without an answer, or hangs, fails its case and is replaced.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import Any

from anyflex.errors import AnyflexError, ArgumentError, BackendRefused, PluginError
from anyflex.testing.case_types import BehaviourCase, Case
from anyflex.testing.child_process import killed_by, what_to_open, why_not_fresh
from anyflex.testing.kit_worker import MARK
from anyflex.testing.runner import Outcome, died, timed_out
from anyflex.testing.session import Session
from anyflex.testing.time_limit import GRACE

__all__ = ["Pool"]

_START_SECONDS = 300.0
"""Time limit in seconds for the imports and the session of all processes at once."""
_END_SECONDS = 10.0
"""Time limit in seconds for an interpreter's exit and for releasing a device."""

# The channel is taken away first, because an import may print.
_START = (
    "import json, os, sys; channel = os.dup(0), os.dup(1); "
    "os.dup2(os.open(os.devnull, os.O_RDONLY), 0); os.dup2(2, 1); "
    "sys.path[:] = json.loads(sys.argv[1]); "
    "from anyflex.testing.kit_worker import main; main(*channel)"
)


class Pool:
    """Processes that run cases on sessions of their own; a context manager, which ends them.

    Args:
        session: the session that the processes open too.
        jobs: how many run at once.
        require: sets whose cases must be accepted.
        expected: case -> reason, for failures that the plugin's authors know of.
        seconds: the limit of one case, 0 for none; the start of a process isn't counted.

    Raises:
        ArgumentError: other processes can't find the backend.
    """

    def __init__(
        self,
        session: Session,
        jobs: int,
        *,
        require: frozenset[str] = frozenset(),
        expected: Mapping[str, str] | None = None,
        seconds: float = 0.0,
    ) -> None:
        reason = why_not_fresh(session)
        if reason is not None:
            raise ArgumentError(
                f"backend {session.name!r} can't be tried in several processes: {reason}; let its "
                "class stand in a module that can be imported, under its own name, or leave "
                "--jobs out"
            )
        self._session = session
        self._require = require
        self._seconds = seconds
        self._task = {
            **what_to_open(session),
            "threads": session.threads,
            "require": sorted(require),
            "expected": None if expected is None else dict(expected),
            "seconds": seconds,
        }
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="anyflex-conformance")
        self._lock = threading.Lock()
        self._closed = False
        self._processes: set[_Process] = set()
        self._idle: list[_Process] = []

    def run(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        """Yield each outcome as it is known; cases that want the machine alone come last.

        Raises:
            BackendRefused, PluginError, ArgumentError: a process can't open the session, or ends
                before it could.
        """
        beside = [self._threads.submit(self._run, case) for case in cases if not _alone(case)]
        for future in as_completed(beside):
            yield future.result()
        for case in filter(_alone, cases):
            yield self._threads.submit(self._run, case).result()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        with self._lock:
            self._closed = True
            processes = list(self._processes)
        try:
            if kind is None:
                for process in processes:
                    process.dismiss()
                # They end at the same time.
                deadline = time.monotonic() + _END_SECONDS
                for process in processes:
                    process.ends_within(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.how_it_ended()
            self._threads.shutdown(cancel_futures=True)

    def _run(self, case: Case) -> Outcome:
        process = self._take()
        begin = time.perf_counter()
        # The process ends itself in time, with a traceback, unless it can't do even that.
        answer = process.ask({"case": case.name}, self._seconds and self._seconds + GRACE)
        taken = time.perf_counter() - begin
        if answer is not None:
            if answer["last"]:
                self._drop(process)
            else:
                with self._lock:
                    self._idle.append(process)
            return Outcome(**answer["outcome"])
        how = self._drop(process)
        if self._seconds and taken >= self._seconds:
            then = "its process was killed"
            return timed_out(self._session, case, self._seconds, require=self._require, then=then)
        return died(self._session, case, how, taken, require=self._require)

    def _take(self) -> _Process:
        """Return a waiting process, or a new one."""
        with self._lock:
            if self._closed:
                raise CancelledError
            if self._idle:
                return self._idle.pop()
            # There are never more processes than threads that take one.
            process = _Process()
            self._processes.add(process)
        begin = time.perf_counter()
        answer = process.ask(self._task, _START_SECONDS)
        taken = time.perf_counter() - begin
        if answer is not None and "error" not in answer:
            return process
        how = self._drop(process)
        if answer is not None:
            raise self._error(answer["error"], answer["message"])
        if taken >= _START_SECONDS:
            how = f"was not ready within {_START_SECONDS:g} s"
        raise self._broken(
            f"a process for cases of backend {self._session.name!r} {how}, before its first case: "
            "what it said is on stderr"
        )

    def _error(self, kind: str, message: str) -> AnyflexError:
        if kind == "BackendRefused":
            return BackendRefused(message)
        return ArgumentError(message) if kind == "ArgumentError" else self._broken(message)

    def _broken(self, message: str) -> PluginError:
        return PluginError(
            message, plugin=self._session.name, distribution=self._session.distribution
        )

    def _drop(self, process: _Process) -> str:
        """End a process, and all that it has started; return how it ended."""
        process.kill()
        how = process.how_it_ended()
        with self._lock:
            self._processes.discard(process)
        return how


class _Process:
    """One process, and the channel to it."""

    def __init__(self) -> None:
        # A session of its own: all processes that it starts are killed with it, and Ctrl-C goes to
        # the parent.
        self._child = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._questions = self._child.stdin
        self._answers = self._child.stdout
        # Held while its end is waited for: afterwards another process may have its number.
        self._reaping = threading.Lock()

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """Return its answer, or None if it ends without one.

        Args:
            question: plain data.
            seconds: after which it is killed; 0 for never.
        """
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        if seconds:
            timer.start()
        try:
            self._questions.write(json.dumps(question).encode() + b"\n")
            self._questions.flush()
            line = next((line for line in self._answers if line.startswith(MARK)), b"")
        except OSError:
            # It ended before it read: `how_it_ended` has the reason.
            return None
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            return None
        answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
        return answer

    def dismiss(self) -> None:
        """Let it end: it has answered, and nothing else is asked."""
        try:
            self._questions.close()
        except OSError:
            # It has ended by itself.
            return

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end; return whether it ended in time."""
        with self._reaping:
            try:
                self._child.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
            self._answers.close()
            return True

    def kill(self) -> None:
        """Kill it and the processes that it has started."""
        with self._reaping:
            if self._child.returncode is not None:
                return
            if not hasattr(os, "killpg"):
                self._child.kill()
                return
            try:
                os.killpg(self._child.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                # macOS raises this for a group without running processes.
                return

    def how_it_ended(self) -> str:
        """Describe the end of a process that was killed or has closed its channel."""
        self.dismiss()
        if not self.ends_within(_END_SECONDS):
            # It waits in the kernel, for example for a device, where no signal reaches it.
            return "was killed and doesn't end"
        status = self._child.returncode
        return f"ended with exit status {status}" if status >= 0 else killed_by(-status)


def _alone(case: Case) -> bool:
    return isinstance(case, BehaviourCase) and case.alone
