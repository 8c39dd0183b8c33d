"""The kit's cases in several processes at once: the parent's side.

`anyflex.testing.kit_worker` is the other.

Processes start fresh, since a forked one can't use the parent's device. Each takes the next case
when it has answered. One that ends without an answer, or hangs, fails its case and is replaced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed

from anyflex.errors import AnyflexError, ArgumentError, BackendRefused, PluginError
from anyflex.testing.case_types import BehaviourCase, Case
from anyflex.testing.child_process import FreshProcess, what_to_open, why_not_fresh
from anyflex.testing.runner import Outcome, failed, hung
from anyflex.testing.session import Session
from anyflex.testing.time_limit import GRACE

__all__ = ["Pool"]

_START_SECONDS = 300.0
"""Time limit in seconds for the imports and the session of all processes at once."""


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
            "task": "open",
            **what_to_open(session),
            "threads": session.threads,
            "require": sorted(require),
            "expected": None if expected is None else dict(expected),
            "seconds": seconds,
        }
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="anyflex-conformance")
        self._lock = threading.Lock()
        self._closed = False
        self._processes: set[FreshProcess] = set()
        self._idle: list[FreshProcess] = []

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

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._closed = True
            processes = list(self._processes)
        for process in processes:
            process.kill()
        for process in processes:
            process.end()
        self._threads.shutdown(cancel_futures=True)

    def _run(self, case: Case) -> Outcome:
        process = self._take()
        begin = time.perf_counter()
        # The process ends itself in time, with a traceback, unless it can't do even that.
        answer = process.ask(
            {"task": "case", "case": case.name}, self._seconds and self._seconds + GRACE
        )
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
            taken, detail = self._seconds, hung(self._seconds, "its process was killed")
        else:
            detail = f"its process {how}"
        return failed(self._session, case, detail, taken, require=self._require)

    def _take(self) -> FreshProcess:
        """Return a waiting process, or a new one."""
        with self._lock:
            if self._closed:
                raise CancelledError
            if self._idle:
                return self._idle.pop()
            # There are never more processes than threads that take one.
            process = FreshProcess("kit_worker")
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

    def _drop(self, process: FreshProcess) -> str:
        """End a process, and all that it has started; return how it ended."""
        how = process.end()
        with self._lock:
            self._processes.discard(process)
        return how


def _alone(case: Case) -> bool:
    return isinstance(case, BehaviourCase) and case.alone
