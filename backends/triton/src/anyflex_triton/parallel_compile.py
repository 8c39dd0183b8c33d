"""Concurrent compilation of several programs.

Triton's front end, a sixth of a kernel's compile time, holds Python's lock; the later passes
don't.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from anyflex_triton.program import Program

__all__ = ["begin_compiling", "compile_all"]


def compile_all(
    programs: Sequence[Program], device: torch.device
) -> Iterator[tuple[Program, BaseException | None]]:
    """Compile all programs, each in a thread. Yield each program as soon as it is done, with the
    exception that its compiler raised."""
    with ThreadPoolExecutor(len(programs)) as pool:
        futures = {pool.submit(_compile_there, program, device): program for program in programs}
        for future in as_completed(futures):
            yield futures[future], future.exception()


def _compile_there(program: Program, device: torch.device) -> None:
    # The current device is a thread's own.
    with torch.get_device_module(device).device(device):
        program.compile(device.index)


def begin_compiling(programs: Sequence[Program], target: Any) -> None:
    """Compile programs that will be needed soon, each in a thread of its own, without loading
    them. Each begins when the front end of the one before is done: several front ends at a time
    would keep Python's lock from the thread that compiles a program needed now. The process ends
    only after they are done. An error is ignored: the program is compiled again when it is needed,
    and raises then.

    Args:
        target: the compiler's.
    """
    if not programs:
        return
    first, *rest = programs
    waiting = [rest]

    def begin_rest() -> None:
        if waiting:
            begin_compiling(waiting.pop(), target)

    def compile_first() -> None:
        with contextlib.suppress(Exception):
            first.compile_ahead(target, begin_rest)
        # Its front end hasn't run: the program was compiled before, or failed.
        begin_rest()

    # If no thread can be started, nothing is compiled ahead.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=compile_first, name="anyflex-triton").start()
