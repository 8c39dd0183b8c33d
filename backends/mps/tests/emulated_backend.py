"""Backend whose kernels run in the emulator. Other processes import this module too."""

from __future__ import annotations

import os
from functools import partial

import torch
from emulator import compile_shader

from anyflex_mps.backend import MpsBackend
from anyflex_mps.shaders import CompileShader

__all__ = ["SCHEDULE", "Emulated"]

SCHEDULE = "METAL_EMULATOR_SCHEDULE"
"""Environment variable that names the order in which threads run, of the emulator's SCHEDULES."""


def _schedule() -> str:
    return os.environ.get(SCHEDULE, "forward")


class Emulated(MpsBackend):
    """Runs Metal kernels on CPU tensors that pose as an Apple GPU's."""

    def compile_shader(self) -> CompileShader:
        return partial(compile_shader, race=True, schedule=_schedule)

    def device(self) -> torch.device:
        return torch.device("cpu")

    def cores(self) -> int:
        return 8
