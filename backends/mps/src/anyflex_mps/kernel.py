"""Kernel class of a compiled spec: chooses the launches of a call, and their workspace."""

from __future__ import annotations

from typing import Literal

import torch

from anyflex.plugin import Call, GradInputs, Grads, Kernel, Outputs, Saved, Spec, TensorSpec
from anyflex_mps.backward_call import backward_workspace, launch_backward
from anyflex_mps.decode_call import decode_workspace, decodes, launch_decode, splits_of
from anyflex_mps.forward_call import launch_forward
from anyflex_mps.shaders import Shaders
from anyflex_mps.spec_shaders import SpecShaders
from anyflex_mps.tiles import tile_for

__all__ = ["MpsKernel"]


class MpsKernel(Kernel):
    """Chooses and launches the kernels of one spec."""

    def __init__(self, spec: Spec, shaders: Shaders, cores: int) -> None:
        self.spec = spec
        self._made = SpecShaders(spec, shaders, cores)

    def describe(self, call: Call) -> str:
        """Return ``decode splits=8`` or ``prefill 32x32``: rows by keys of a step."""
        if decodes(self.spec, call):
            return f"decode splits={splits_of(self.spec, call, self._made.cores).number}"
        tile = tile_for("forward", self.spec)
        return f"prefill {tile.rows}x{tile.step}"

    def saved_outputs(self, call: Call) -> tuple[TensorSpec, ...]:
        """Return the rounding residual of out, if any, which backward's delta needs, and each
        row's largest score and the logarithm of its sum, which weights of huge scores need."""
        spec, rows = self.spec, tuple(call.query.shape[:3])
        if not spec.needs_backward:
            return ()
        tops = TensorSpec((*rows, 2), torch.float32)
        if spec.dtype is torch.float32:
            return (tops,)
        return (TensorSpec((*rows, spec.value_head_dim), spec.dtype), tops)

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        """Return the workspace: row values and exact sums for backward, splits for decoding."""
        if direction == "backward":
            return backward_workspace(self.spec, call)
        if decodes(self.spec, call):
            return decode_workspace(self.spec, call, self._made.cores)
        return ()

    def forward(self, call: Call, out: Outputs) -> None:
        """Fill `out`."""
        if decodes(self.spec, call):
            launch_decode(self._made, call, out)
        else:
            launch_forward(self._made, call, out)

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        """Fill `grads`."""
        if call.query.numel() == 0 or call.key.numel() == 0 or call.value.numel() == 0:
            for gradient in (grads.dq, grads.dk, grads.dv):
                if gradient is not None:
                    gradient.zero_()
            return
        launch_backward(self._made, call, saved, grad, grads)
