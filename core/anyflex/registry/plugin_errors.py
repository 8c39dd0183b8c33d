"""Error boundary around plugin code: whatever it raises is recorded, named, and stops nothing
else.

This is the one place of the package that catches `Exception` and `SystemExit`: vendor libraries
call ``exit()`` at import. What was caught becomes a `PluginError` whose ``__cause__`` keeps the
traceback; callers either raise it (the backend was asked for by name, or ANYFLEX_STRICT=1) or
report it once and go on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from typing import Any

import torch

from anyflex.errors import AnyflexError, PluginError
from anyflex.registry import cached_state, environment

__all__ = [
    "again",
    "first_line",
    "load_object",
    "plugin_code",
    "plugin_error",
    "report",
]

_log = logging.getLogger("anyflex")
_reported: set[tuple[str, str, str]] = set()


@contextmanager
def plugin_code(
    plugin: str, distribution: str, doing: str, *, may_refuse: bool = False
) -> Iterator[None]:
    """Run a plugin's code in the body; turn what it raises into a `PluginError`.

    Args:
        plugin: entry-point name.
        distribution: ``"name version"``.
        doing: what was being done, for the message: ``"importing anyflex_cuda.backend"``.
        may_refuse: it is about the user's call, which it may refuse by anyflex's own errors: they
            pass, and so does a device that ran out of memory.
    """
    try:
        yield
    except (Exception, SystemExit) as cause:  # This is the wall: see the module's docstring.
        if may_refuse and isinstance(cause, (AnyflexError, torch.OutOfMemoryError)):
            raise
        problem = f"is broken: {doing} raised {first_line(cause).rstrip('.')}."
        cure = _cure(plugin, distribution)
        raise plugin_error(plugin, distribution, f"{problem} {cure}") from cause


def plugin_error(plugin: str, distribution: str, problem: str) -> PluginError:
    """Return the error of a plugin, whose problem continues the sentence."""
    return PluginError(
        f"plugin {plugin!r} of {distribution} {problem}", plugin=plugin, distribution=distribution
    )


def load_object(plugin: str, distribution: str, value: str) -> Any:
    """Import what an entry point names, ``"module:attribute"``. Raises `PluginError`."""
    with plugin_code(plugin, distribution, f"importing {value.partition(':')[0]}"):
        return EntryPoint(plugin, value, group="").load()


def _cure(plugin: str, distribution: str) -> str:
    package = distribution.split(" ")[0]
    return (
        f"Upgrade or reinstall {package}, or set ANYFLEX_DISABLE={plugin}; `anyflex doctor` shows "
        "the traceback"
    )


def first_line(error: BaseException) -> str:
    """Return ``"Type: first line of the message"``."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def again(error: PluginError) -> PluginError:
    """Return a fresh copy of a recorded error: one object raised in several threads would collect
    all their tracebacks."""
    copy = type(error)(str(error), plugin=error.plugin, distribution=error.distribution)
    copy.__cause__ = error.__cause__
    return copy


def report(error: PluginError, consequence: str = "") -> None:
    """Log a broken plugin once, or raise `error` under ANYFLEX_STRICT=1.

    Args:
        error: what is wrong.
        consequence: what happens instead, for the log line.
    """
    if environment.strict():
        raise again(error)
    # Keyed by cause: a backend that can't compile fails for many specs in the same way.
    cause = error.__cause__
    key = (error.plugin, error.distribution, str(error) if cause is None else first_line(cause))
    if key in _reported:
        return
    _reported.add(key)
    _log.warning("%s%s", error, f" ({consequence})" if consequence else "")
    _log.debug("traceback of %s", error.plugin, exc_info=error)


cached_state.on_replaced(_reported.clear)  # for tests, which look for reports again
