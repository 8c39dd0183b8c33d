"""Backends of an M5 whose matrix units lay results out at random, anew for each kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

from emulated_backend import Emulated, schedule_in_force
from tensor_kernel import shuffled

from anyflex.plugin import Artifacts, Call, Kernel, Outputs, Spec, TensorSpec
from anyflex_mps.forward_call import launch_forward
from anyflex_mps.kernel import MpsKernel
from anyflex_mps.shaders import CompileShader, Shaders

__all__ = ["Forced", "Shuffled"]


class Shuffled(Emulated):
    """Runs kernels in the race build, results of products in a layout at random."""

    def compile_shader(self) -> CompileShader:
        return partial(shuffled, race=True, schedule=schedule_in_force)


class Forced(Shuffled):
    """Computes forward on matrix units, whose float32 is exact here, without the option: in every
    call of head dims that their tiles have memory for, decoding ones too."""

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        if max(spec.head_dim, spec.value_head_dim) > 64:
            return super().compile(spec, artifacts)
        spec = replace(spec, options=(("mpp", True),))
        return _Undecoded(spec, Shaders(self.compile_shader()), self.cores())


class _Undecoded(MpsKernel):
    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        return () if direction == "forward" else super().workspace(call, direction)

    def forward(self, call: Call, out: Outputs) -> None:
        launch_forward(self._made, call, out)
