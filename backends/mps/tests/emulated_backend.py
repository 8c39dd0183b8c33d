"""Backend whose kernels run in the emulator. Other processes import this module too."""

from __future__ import annotations

import os
import zlib
from functools import partial

import torch
from emulator import SCHEDULES, compile_shader

from anyflex_mps.backend import MpsBackend
from anyflex_mps.shaders import CompileShader

__all__ = ["SCHEDULE", "Emulated", "drawn_schedule", "schedule_in_force"]

SCHEDULE = "METAL_EMULATOR_SCHEDULE"
"""Environment variable that names the order in which threads run, of the emulator's SCHEDULES."""


def schedule_in_force() -> str:
    """Return the name of the order in which threads run."""
    return os.environ.get(SCHEDULE, "forward")


def drawn_schedule(case: str) -> str:
    """Return an order for a case of the kit, always the same one."""
    return SCHEDULES[zlib.crc32(case.encode()) % len(SCHEDULES)]


class Emulated(MpsBackend):
    """Runs Metal kernels on CPU tensors that pose as an Apple GPU's."""

    def compile_shader(self) -> CompileShader:
        return partial(compile_shader, race=True, schedule=schedule_in_force)

    def device(self) -> torch.device:
        return torch.device("cpu")

    def cores(self) -> int:
        return 8
