"""Launches: a program with the arguments of one call.

The way from a kernel's `forward` to the driver is `launch_all` -> `Launch.run` ->
`FixedArguments.launch` -> the launcher in C (`nvidia_launch.Launcher`); the first time, and where
that doesn't take the kernel, -> `Program.launch`, which compiles, and Triton's own launcher.
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
    """A program with what it runs on.

    Args:
        values: as `Program.launch`'s.
        sums: tensors that are zeros before and are added to; others are overwritten.
        fixed: the arguments that `values` lack, if any.
    """

    program: Program
    grid: int
    values: Mapping[str, object]
    sums: Sequence[Tensor] = ()
    fixed: FixedArguments | None = None

    def run(self, device: torch.device) -> None:
        """Run it on the current stream of the current device."""
        if self.fixed is None:
            self.program.launch(self.grid, device, self.values)
        else:
            self.fixed.launch(self.program, self.grid, device, self.values)


class FixedLaunch(NamedTuple):
    """Common part of the launches of calls whose tensors have the same shapes, strides and
    alignment.

    Args:
        program, grid: as `Launch`'s.
        arguments: of the kernel.
    """

    program: Program
    grid: int
    arguments: FixedArguments

    @classmethod
    def of(cls, launch: Launch, of_call: Collection[str]) -> FixedLaunch:
        """Return a launch's, whose tensors and arguments named in `of_call` are the call's own."""
        return cls(launch.program, launch.grid, FixedArguments.of(launch.values, of_call))

    def launch(self, values: Mapping[str, object]) -> Launch:
        """Return the launch with a call's values."""
        return Launch(self.program, self.grid, values, (), self.arguments)


def launch_all(launches: Sequence[Launch], device: torch.device) -> None:
    """Run launches one after the other on the current stream of the current device. Before that
    all are compiled."""
    missing = [
        launch.program for launch in launches if not launch.program.is_compiled(device.index)
    ]
    if len(missing) > 1 and device.type != "cpu":
        compile_missing(missing, device)
    for launch in launches:
        launch.run(device)


def milliseconds(launch: Callable[[], None]) -> float:
    """Return the median of a launch's times on the current device, caches flushed before each; in
    the interpreter the wall time of one launch."""
    if INTERPRETED:
        begin = time.perf_counter()
        launch()
        return (time.perf_counter() - begin) * 1e3
    from triton.testing import do_bench

    return float(do_bench(launch, return_mode="median"))
