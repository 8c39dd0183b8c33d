"""Launching the same kernel again for calls of one shape: most of its arguments stay.

Triton's launcher puts its arguments together anew and encodes each descriptor at each launch: 11
of the 35 us that a call of attention took the host. Where it is known how to launch past it, a
launch writes what belongs to the call over what was laid out before: see `nvidia_launch`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflex_triton.arguments import Boxes
from anyflex_triton.launch import Launch, Program, hooked, launch_by
from anyflex_triton.nvidia_launch import Launcher

__all__ = ["FixedArguments", "FixedLaunch"]


class FixedArguments:
    """Arguments that calls of one shape on one device have in common. Thread-safe.

    Args:
        values: by name; of a descriptor what `Boxes` takes beside the base.
        described: name of a descriptor -> name of its tensor, where that is an argument too; else
            they have one name.
    """

    def __init__(
        self, values: Mapping[str, Any], described: Mapping[str, str] | None = None
    ) -> None:
        self.values = values
        self._described = described or {}
        self._launchers: dict[Program, Launcher | None] = {}

    @classmethod
    def of(cls, values: Mapping[str, Any], without: Collection[str]) -> FixedArguments:
        """Those of all values that are neither tensors nor named in `without`."""
        return cls(
            {
                name: (value.shape, value.strides, value.block_shape)
                if isinstance(value, Boxes)
                else value
                for name, value in values.items()
                if name not in without and not isinstance(value, Tensor)
            }
        )

    def launch(
        self, program: Program, grid: int, device: torch.device, values: Mapping[str, Any]
    ) -> None:
        """Run `grid` programs on the current stream of the current device.

        Args:
            values: of all other arguments that aren't constants, and more; of a descriptor the
                tensor, under the tensor's name.
        """
        launcher = self._launchers.get(program)
        if launcher is None or hooked():
            program.launch(grid, device, self._together(values))
            if program not in self._launchers:
                self._remember(program, device, values)
            return
        launch_by(launcher, grid, device, values)

    def _together(self, values: Mapping[str, Any]) -> dict[str, Any]:
        together = {**values, **self.values}
        for name, fixed in self.values.items():
            tensor = values.get(self._described.get(name, name))
            if tensor is not None:
                together[name] = Boxes(tensor, *fixed)
        return together

    def _remember(self, program: Program, device: torch.device, values: Mapping[str, Any]) -> None:
        """Lay out how to launch a program that was compiled, or that there is no such way."""
        # Else it is interpreted, or somebody else's launch stands in for the program's.
        if program.compiled(device.index) is not None:
            self._launchers[program] = program.launcher(
                device.index, self.values, self._described, values
            )


class FixedLaunch(NamedTuple):
    """What launches have in common of calls whose tensors have the same shapes, strides and
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
        """Return a launch's, whose arguments named in `of_call`, and its tensors, are a call's."""
        return cls(launch.program, launch.grid, FixedArguments.of(launch.values, of_call))

    def launch(self, values: Mapping[str, object]) -> Launch:
        """Return the launch with a call's values."""
        return Launch(self.program, self.grid, values, (), self.arguments)
