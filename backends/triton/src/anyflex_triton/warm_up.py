"""Warm-up of a process: modules in C that its first launch needs, made beside its first compile.

Triton's module for the driver and the launcher in C are compiled by a C compiler once a machine,
and loaded once a process. Threads do that while the main one writes mods and compiles kernels,
which shortens a first call on a new machine by a quarter.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

from triton.runtime import driver

from anyflex.plugin import free_in_child
from anyflex_triton.nvidia_launch import IS_KNOWN, launch_module

__all__ = ["begin_warm_up", "current_target"]

_threads: dict[Callable[[], object], threading.Thread] = {}
_begins = threading.Lock()
free_in_child(sys.modules[__name__], "_begins")


def begin_warm_up() -> None:
    """Begin to make the modules, once a process. A failure is left to the first launch, which
    tries again and raises."""
    with _begins:
        for task in (_make_driver, launch_module) if IS_KNOWN else (_make_driver,):
            if task not in _threads:
                thread = threading.Thread(
                    target=_attempt, args=(task,), name="anyflex-triton", daemon=True
                )
                # Where no thread can be started nothing is begun early.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    _threads[task] = thread


def current_target() -> Any:
    """Return the current device as Triton's compiler names it. Waits for the driver's module if it
    is being made: Triton's own way to it isn't made for several threads."""
    thread = _threads.get(_make_driver)
    if thread is not None:
        thread.join()
    return driver.active.get_current_target()


def _make_driver() -> None:
    driver.active  # noqa: B018


def _attempt(task: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        task()
