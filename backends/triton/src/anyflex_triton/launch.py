"""Launches: a program with the arguments of one call.

A kernel's `forward` reaches the driver by `launch_all` -> `Launch.run` -> `FixedArguments.launch`
-> the launcher in C (`nvidia_launch.Launcher`). The first launch, and kernels that this launcher
doesn't take, go by `Program.launch`, which compiles, and Triton's own launcher.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyflex_triton.parallel_compile import compile_missing
from anyflex_triton.prepared_launch import FixedArguments
from anyflex_triton.program import INTERPRETED, Program

__all__ = ["FixedLaunch", "Launch", "launch_all", "milliseconds"]


class Launch(NamedTuple):
    """A program with its grid and arguments.

    Args:
        values: as in `Program.launch`.
        sums: tensors that are added to and hold zeros before; others are overwritten.
        fixed: the arguments that `values` lacks, if any.
    """

    program: Program
    grid: int
    values: Mapping[str, object]
    sums: Sequence[Tensor] = ()
    fixed: FixedArguments | None = None

    def run(self, device: torch.device) -> None:
        """Run the program on the current stream of the current device."""
        if self.fixed is None:
            self.program.launch(self.grid, device, self.values)
        else:
            self.fixed.launch(self.program, self.grid, device, self.values)


class FixedLaunch(NamedTuple):
    """Common part of the launches of calls whose tensors have the same shapes, strides and
    alignment.

    Args:
        program, grid: as in `Launch`.
        arguments: arguments of the kernel.
    """

    program: Program
    grid: int
    arguments: FixedArguments

    @classmethod
    def of(cls, launch: Launch, of_call: Collection[str]) -> FixedLaunch:
        """Return the common part of a launch; tensors and arguments named in `of_call` are
        excluded."""
        return cls(launch.program, launch.grid, FixedArguments.of(launch.values, of_call))

    def launch(self, values: Mapping[str, object]) -> Launch:
        """Return the launch with a call's values."""
        return Launch(self.program, self.grid, values, (), self.arguments)


def launch_all(launches: Sequence[Launch], device: torch.device) -> None:
    """Compile all launches' programs, then run them one after the other on the current stream of
    the current device."""
    missing = [
        launch.program for launch in launches if not launch.program.is_compiled(device.index)
    ]
    if len(missing) > 1 and device.type != "cpu":
        compile_missing(missing, device)
    for launch in launches:
        launch.run(device)


def milliseconds(launch: Callable[[], None]) -> float:
    """Return the median time of a launch on the current device, caches flushed before each run; in
    the interpreter the wall time of one launch."""
    if INTERPRETED:
        begin = time.perf_counter()
        launch()
        return (time.perf_counter() - begin) * 1e3
    from triton.testing import do_bench

    return float(do_bench(launch, return_mode="median"))
