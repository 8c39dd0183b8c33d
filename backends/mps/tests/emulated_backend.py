"""Backend whose kernels run in the emulator. Other processes import this module too."""

from __future__ import annotations

from functools import partial

import torch
from emulator import compile_shader

from anyflex_mps.backend import MpsBackend
from anyflex_mps.shaders import CompileShader

__all__ = ["Emulated"]


class Emulated(MpsBackend):
    """Runs Metal kernels on CPU tensors that pose as an Apple GPU's."""

    def compile_shader(self) -> CompileShader:
        return partial(compile_shader, race=True)

    def device(self) -> torch.device:
        return torch.device("cpu")

    def cores(self) -> int:
        return 8
