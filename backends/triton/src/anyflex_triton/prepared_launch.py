"""Arguments that the launches of calls of one shape share, laid out once.

Triton's launcher packs its arguments and encodes each descriptor at each launch, which was 11 of
the 35 us of host time of an attention call. Where the launcher in C takes a kernel
(`nvidia_launch`), a launch writes only a call's own arguments over those that were laid out
before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from anyflex_triton.arguments import Boxes
from anyflex_triton.nvidia_launch import Launcher
from anyflex_triton.program import Program
from anyflex_triton.triton_launch import hooked

__all__ = ["FixedArguments"]


class FixedArguments:
    """Arguments that calls of one shape on one device share. Thread-safe.

    Args:
        values: arguments by name; for a descriptor the arguments of `Boxes` without the base.
        described: name of a descriptor -> name of its tensor, where the tensor is an argument too;
            otherwise they have one name.
    """

    def __init__(
        self, values: Mapping[str, Any], described: Mapping[str, str] | None = None
    ) -> None:
        self.values = values
        self._described = described or {}
        self._launchers: dict[Program, Launcher | None] = {}

    @classmethod
    def of(cls, values: Mapping[str, Any], without: Collection[str]) -> FixedArguments:
        """Return the values that are neither tensors nor named in `without`."""
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
            values: all other arguments that aren't constants, and possibly more; for a descriptor
                the tensor, under the tensor's name.
        """
        launcher = self._launchers.get(program)
        if launcher is not None and not hooked():
            launcher.launch(grid, device, values)
            return
        program.launch(grid, device, self.together(values))
        if program not in self._launchers:
            self._launchers[program] = program.fixed_launcher(
                device.index, self.values, self._described, values
            )

    def together(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments of a launch, including a call's values."""
        together = {**values, **self.values}
        for name, fixed in self.values.items():
            tensor = values.get(self._described.get(name, name))
            if tensor is not None:
                together[name] = Boxes(tensor, *fixed)
        return together
