"""Warm-up of a process: what its first compile and launch need, made beside its other work.

Triton's module for the driver and the launcher in C are compiled by a C compiler once a machine,
and loaded once a process. Threads do that while the main one writes mods and compiles kernels,
which shortens a first call on a new machine by a quarter. A third one makes the checksum of
Triton's library of 400 MB that Triton wants before its first compile in a process.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

from triton.runtime import cache, driver

from anyflex.plugin import free_in_child
from anyflex_triton.nvidia_launch import IS_KNOWN, launch_module

__all__ = ["await_checksum", "begin_warm_up", "current_target"]

_threads: dict[Callable[[], object], threading.Thread] = {}
_begins = threading.Lock()
free_in_child(sys.modules[__name__], "_begins")


def begin_warm_up(compiles: bool) -> None:
    """Begin to make the modules and the checksum, once a process. A failure is left to whoever
    needs them, who tries again and raises.

    Args:
        compiles: whether a kernel will be compiled, which the checksum is for.
    """
    tasks = [_make_driver]
    tasks += [launch_module] * IS_KNOWN + [_make_checksum] * compiles
    with _begins:
        for task in tasks:
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


def await_checksum() -> None:
    """Wait for the checksum if it is being made: another caller would make it again."""
    thread = _threads.get(_make_checksum)
    if thread is not None:
        thread.join()


def _make_checksum() -> None:
    # Triton keeps the result. One that has no such function makes it as it compiles.
    cache.triton_key()


def _make_driver() -> None:
    driver.active  # noqa: B018


def _attempt(task: Callable[[], object]) -> None:
    with contextlib.suppress(Exception):
        task()
