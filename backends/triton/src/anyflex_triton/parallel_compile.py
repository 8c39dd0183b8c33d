"""Compiling several programs side by side.

Triton's front end, a sixth of the time that a kernel takes, holds Python's lock; what follows it
doesn't.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from anyflex_triton.program import Program

__all__ = ["begin_compiling", "compile_all", "compile_missing"]


def compile_all(
    programs: Sequence[Program], device: torch.device
) -> Iterator[tuple[Program, BaseException | None]]:
    """Compile all; where no thread is to be had, in this one. Yield each as soon as it is done,
    with what its compiler raised."""
    futures = {}
    remaining = []
    with ThreadPoolExecutor(len(programs)) as pool:
        for program in programs:
            try:
                futures[pool.submit(_compile_there, program, device)] = program
            except RuntimeError:
                # Its thread couldn't be started.
                remaining.append(program)
        for future in as_completed(futures):
            yield futures[future], future.exception()
    for program in remaining:
        try:
            _compile_there(program, device)
        except Exception as error:  # noqa: BLE001  as a thread's, it is handed on
            yield program, error
        else:
            yield program, None


def _compile_there(program: Program, device: torch.device) -> None:
    # Which device is the current one is a thread's own.
    with torch.get_device_module(device).device(device):
        program.compile(device.index)


def compile_missing(programs: Sequence[Program], device: torch.device) -> None:
    """Compile the programs that aren't kept on disk, side by side. The others are loaded first,
    one after the other: threads that read files would wait for Python's lock.

    Raises:
        Exception: what the compiler said of one.
    """
    missing = [program for program in programs if not program.load_kept(device.index)]
    if len(missing) > 1:
        errors = [error for _, error in compile_all(missing, device) if error is not None]
        if errors:
            raise errors[0]
    else:
        for program in missing:
            program.compile(device.index)


def begin_compiling(programs: Sequence[Program], target: Any) -> None:
    """Compile programs that will be needed soon, each in a thread of its own, without loading
    them. Each begins when the front end of the one before is done: several front ends at a time
    would keep Python's lock from whoever compiles what is needed now. The process ends after they
    do. What fails is tried again when it is needed, and raised then.

    Args:
        target: of the compiler.
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
        # Its front end hasn't run: it was compiled before, or failed.
        begin_rest()

    # If no thread is to be had, nothing is begun.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=compile_first, name="anyflex-triton").start()
