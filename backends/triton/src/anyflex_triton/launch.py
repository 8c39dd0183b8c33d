"""Launches: a program with the arguments of one call.

A kernel's `forward` reaches the driver by `launch_all` -> `Launch.run` -> `FixedLaunch.run` ->
the launcher in C (`nvidia_launch.Launcher`). Kernels that this launcher doesn't take go by
`Program.launch`, to Triton's own launcher or its interpreter.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflex_triton.arguments import Boxes, Part
from anyflex_triton.nvidia_launch import Launcher
from anyflex_triton.program import INTERPRETED, Program
from anyflex_triton.triton_launch import hooked

__all__ = [
    "FixedLaunch",
    "Launch",
    "begin_compiling",
    "compile_all",
    "compile_missing",
    "kept_launch",
    "launch_all",
    "milliseconds",
]


class FixedLaunch:
    """A program with the arguments that calls of one shape on one device share, laid out once.
    Thread-safe.

    Triton's launcher packs its arguments and encodes each descriptor at each launch, which was 11
    of the 35 us of host time of an attention call. The launcher in C writes only a call's own
    arguments over those that were laid out before.

    Args:
        program, grid: what runs, in how many programs.
        values: arguments by name, all descriptors among them, as `Boxes` or as the arguments of
            `Boxes` without the base. Tensors are left out.
        named: name of an argument -> name of the call's value that it takes, where they differ, or
            the part of one; for a descriptor that of its tensor.

    Attributes:
        launcher: the launcher in C; None before the first run, and where it isn't used.
    """

    def __init__(
        self,
        program: Program,
        grid: int,
        values: Mapping[str, Any],
        named: Mapping[str, str | Part] | None = None,
    ) -> None:
        self.program = program
        self.grid = grid
        self.launcher: Launcher | None = None
        self.values = {
            name: (value.shape, value.strides, value.block_shape)
            if isinstance(value, Boxes)
            else value
            for name, value in values.items()
            if not isinstance(value, Tensor)
        }
        self._named = named or {}
        self._is_made = False

    def launch(self, values: Mapping[str, object], sums: Sequence[Tensor] = ()) -> Launch:
        """Return the launch with a call's values."""
        return Launch(self, values, sums)

    def run(self, device: torch.device, values: Mapping[str, Any]) -> None:
        """Run the program on the current stream of the current device.

        Args:
            values: all other arguments that aren't constants, and possibly more; for a descriptor
                the tensor, under the tensor's name.
        """
        if not self._is_made:
            self.launcher = self.program.launcher(device, self.values, self._named, values)
            self._is_made = True
        launcher = self.launcher
        if launcher is None or hooked():
            self.program.launch(self.grid, device, self.together(values))
        else:
            launcher.launch(self.grid, device, values)

    def together(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of a launch, including a call's values."""
        given = dict(values)
        for name, source in self._named.items():
            if name in self.program.types:  # else it is a constant of this kernel, or not there
                given[name] = (
                    source.within(values[source.of])
                    if isinstance(source, Part)
                    else values[source]
                )
        together = {**given, **self.values}
        for name, fixed in self.values.items():
            tensor = given.get(name)
            if tensor is not None:
                together[name] = Boxes(tensor, *fixed)
        return together


class Launch(NamedTuple):
    """A launch with a call's values.

    Args:
        values: as in `FixedLaunch.run`.
        sums: tensors that are added to and hold zeros before; others are overwritten.
    """

    fixed: FixedLaunch
    values: Mapping[str, object]
    sums: Sequence[Tensor] = ()

    @property
    def program(self) -> Program:
        """The program that runs."""
        return self.fixed.program

    def run(self, device: torch.device) -> None:
        """Run the program on the current stream of the current device."""
        self.fixed.run(device, self.values)


def kept_launch(
    parts: dict[object, FixedLaunch], key: object, make: Callable[[], FixedLaunch]
) -> FixedLaunch:
    """Return the launch of this key, made the first time."""
    found = parts.get(key)
    if found is None:
        found = parts[key] = make()
    return found


def compile_all(
    programs: Sequence[Program], device: torch.device
) -> Iterator[tuple[Program, BaseException | None]]:
    """Compile all programs, each in a thread: Triton's front end, a sixth of a kernel's compile
    time, holds Python's lock, and the later passes don't. Yield each program as soon as it is
    done, with the exception that its compiler raised."""
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


def compile_missing(programs: Sequence[Program], device: torch.device) -> None:
    """Compile those of the programs that aren't compiled for the current device, several at a
    time. A single one is left to its launch."""
    missing = [program for program in programs if not program.is_compiled(device.index)]
    if len(missing) > 1 and device.type != "cpu":
        errors = [error for _, error in compile_all(missing, device) if error is not None]
        if errors:
            raise errors[0]


def launch_all(launches: Sequence[Launch], device: torch.device) -> None:
    """Compile all launches' programs, then run them one after the other on the current stream of
    the current device."""
    if hooked() or None in [launch.fixed.launcher for launch in launches]:
        compile_missing([launch.program for launch in launches], device)
        for launch in launches:
            launch.run(device)
        return
    for fixed, values, _ in launches:
        assert fixed.launcher is not None
        fixed.launcher.launch(fixed.grid, device, values)


def milliseconds(launch: Callable[[], None]) -> float:
    """Return the median time of a launch on the current device, caches flushed before each run; in
    the interpreter the wall time of one launch."""
    if INTERPRETED:
        begin = time.perf_counter()
        launch()
        return (time.perf_counter() - begin) * 1e3
    from triton.testing import do_bench

    return float(do_bench(launch, return_mode="median"))
