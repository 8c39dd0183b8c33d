"""A process of `anyflex.testing.kit_pool`: opens the session, then runs the cases it is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from anyflex.errors import ArgumentError, BackendRefused, PluginError
from anyflex.testing.answering import Task
from anyflex.testing.cases import every_case
from anyflex.testing.fresh_process import posed, registered
from anyflex.testing.runner import Outcome, run_cases
from anyflex.testing.session import Session, open_session
from anyflex.testing.time_limit import limited

__all__ = ["TASKS", "device_lost"]

_OPENING_ERRORS = (ArgumentError, BackendRefused, PluginError)

_open = ExitStack()
"""The session, until the process is killed."""
_opened: list[tuple[Session, dict[str, Any]]] = []
"""The session and the task that opened it, or nothing."""


def _opened_by(task: dict[str, Any]) -> dict[str, Any]:
    """Open the session; return the error's name and message if that fails."""
    try:
        _opened.append((_open.enter_context(_session_of(task)), task))
    except _OPENING_ERRORS as error:
        kind = next(kind for kind in _OPENING_ERRORS if isinstance(error, kind))
        return {"error": kind.__name__, "message": str(error)}
    return {}


def _run(question: dict[str, Any]) -> dict[str, Any]:
    """Run a case on the session; return its outcome, and whether it is the last that this process
    can run."""
    ((session, task),) = _opened
    case = every_case()[question["case"]]

    def attempt() -> Outcome:
        require = frozenset(task["require"])
        return next(run_cases(session, [case], require=require, expected=task["expected"]))

    outcome = limited(case.name, attempt, task["seconds"])
    suspect = outcome.status not in ("passed", "refused", "skipped")
    return {
        "outcome": dataclasses.asdict(outcome),
        "last": suspect and device_lost(session.device),
    }


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


@contextmanager
def _session_of(task: dict[str, Any]) -> Iterator[Session]:
    # In the session torch's operations have one thread; this is the number from before.
    torch.set_num_threads(task["threads"])
    with posed(task), ExitStack() as stack:
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


TASKS: dict[str, Task] = {"open": _opened_by, "case": _run}
