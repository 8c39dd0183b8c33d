"""Compiling several programs side by side: compilers hold no lock of Python's, Triton's front end
does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from anyflex_triton.preparation import attempt

if TYPE_CHECKING:
    from anyflex_triton.launch import Program

__all__ = ["begin_compiling", "compile_all", "compile_missing"]


def begin_compiling(programs: Sequence[Program], target: Any) -> None:
    """Compile what will be needed soon, in threads of their own, without loading it. Each begins
    when Python's lock is no longer needed for the one before: several at a time would keep it from
    whoever compiles what is needed now, for half a second of two. The process ends after they do.
    What fails is tried again when it is needed, and raised then."""
    first, *rest = programs
    # Taken out by whoever begins them.
    waiting = [rest] if rest else []

    def begin_rest(*_: object) -> None:
        if waiting:
            begin_compiling(waiting.pop(), target)

    def compile_first() -> None:
        attempt(partial(first.compile_ahead, target, begin_rest))
        # Its front end hasn't run: it was compiled before, or failed.
        begin_rest()

    # If no thread is to be had, nothing is begun.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=compile_first, name="anyflex-triton").start()


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
    """Load one after the other what is in Triton's cache: threads that read files would wait for
    Python's lock, each time for as long as another may keep it. The first that isn't there is
    compiled, and what follows it side by side."""
    beside: list[Future[None]] = []
    with ThreadPoolExecutor(len(programs)) as pool:

        def begin(rest: Sequence[Program], target: object) -> None:
            for program in rest:
                beside.append(pool.submit(_compile_there, program, device))

        for place, program in enumerate(programs, 1):
            program.meanwhile = partial(begin, programs[place:])
            try:
                program.compile(device.index)
            finally:
                program.meanwhile = None
            if beside:
                break
    for future in beside:
        future.result()
    for program in programs:
        # Those for which there was no thread.
        program.compile(device.index)
