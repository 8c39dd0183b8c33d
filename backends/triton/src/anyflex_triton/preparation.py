"""What Triton does once a process before its first kernel, begun beside what else a call does."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable

import torch
from triton.runtime import driver

from anyflex.plugin import free_in_child

__all__ = ["attempt", "await_checksum", "await_driver", "prepare"]

_preparing: dict[Callable[[], None], threading.Thread] = {}
_prepares = threading.Lock()
free_in_child(sys.modules[__name__], "_prepares")


def prepare(*, compiles: bool) -> None:
    """Begin what Triton does once a process, beside what else the first call does before it
    compiles: a checksum of its own files, a module in C that talks to the driver. What fails of
    these is tried again for the first kernel, which raises it for the user.

    Beside them, what launches past Triton: without that Triton's own launches.

    Args:
        compiles: a kernel will be compiled. What was compiled before is found without the
            checksum.
    """
    for task in (_sum_files, _make_driver, _make_launcher)[0 if compiles else 1 :]:
        _begin(task)


def _begin(task: Callable[[], None]) -> None:
    """Begin it in a thread, at most once; where no thread is to be had, nothing is begun early."""
    with _prepares:
        if task not in _preparing:
            thread = threading.Thread(
                target=attempt, args=(task,), name="anyflex-triton", daemon=True
            )
            with contextlib.suppress(RuntimeError):
                thread.start()
                _preparing[task] = thread


def await_driver() -> None:
    """Wait for the module that talks to the driver, if `prepare` began it."""
    _await(_make_driver)


def await_checksum() -> None:
    """Wait for the checksum, which is begun here at the latest."""
    _begin(_sum_files)
    _await(_sum_files)


def _await(task: Callable[[], None]) -> None:
    thread = _preparing.get(task)
    if thread is not None:
        thread.join()


def attempt(task: Callable[[], None]) -> None:
    """What fails early is tried again when it is needed, and raised then."""
    with contextlib.suppress(Exception):
        task()


def _make_driver() -> None:
    driver.active  # noqa: B018


def _sum_files() -> None:
    from anyflex_triton.triton_checksum import take_recorded_checksum

    take_recorded_checksum()


def _make_launcher() -> None:
    from anyflex_triton.nvidia_launch import IS_KNOWN, launch_module

    if IS_KNOWN and torch.version.cuda is not None:
        launch_module()
