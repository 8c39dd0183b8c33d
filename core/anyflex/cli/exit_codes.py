"""Exit statuses of ``anyflex``, the same for every sub-command."""

from __future__ import annotations

import enum

from anyflex.bench.usage_errors import NotRun
from anyflex.errors import (
    AllocationError,
    AnyflexError,
    BackendRefused,
    GraphCaptureError,
    PluginError,
)

__all__ = [
    "ExitCode",
    "UserFileFailed",
    "code_of",
    "exit_code_table",
]


class ExitCode(enum.IntEnum):
    """Exit statuses; `meaning` is their text in ``--help``."""

    meaning: str

    OK = 0, "done, and every check passed"
    CHECK_FAILED = (
        1,
        "a check failed (doctor: a self-test, a plugin that is broken or of another contract, a "
        "wrong variable or an unusable cache folder; demo: the loss or the gradients; cache: a "
        "folder or an archive that can't be used; warm: targets that fail in different ways; "
        "conformance: a case; bench: a backend that computes wrongly or fails)",
    )
    USAGE = (
        2,
        "wrong usage: an argument, a variable or a function that can't be understood, or output "
        "that can't be written",
    )
    NOT_RUN = 3, "not run: a backend refuses the call, or a device or package is missing"
    BROKEN = 4, "a plugin is broken, or the user's own file raised an exception"
    INTERRUPTED = 130, "interrupted, or the reader of the output went away"

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member


class UserFileFailed(AnyflexError):
    """The user's own file raised an exception, which is ``__cause__``. Exit status 4."""


def code_of(error: AnyflexError) -> ExitCode:
    """Return the exit status for an error that ends a command."""
    if isinstance(error, (NotRun, BackendRefused, GraphCaptureError, AllocationError)):
        return ExitCode.NOT_RUN
    if isinstance(error, (PluginError, UserFileFailed)):
        return ExitCode.BROKEN
    return ExitCode.USAGE


def exit_code_table() -> str:
    """Return one line a status, for ``--help``."""
    return "\n".join(f"  {code.value:<4}{code.meaning}" for code in ExitCode)
