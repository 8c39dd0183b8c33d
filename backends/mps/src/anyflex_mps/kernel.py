"""Kernel class of a compiled spec: chooses the launches of a call, and their workspace."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from anyflex.plugin import Call, GradInputs, Grads, Kernel, Outputs, Saved, Spec, TensorSpec
from anyflex_mps.addressing import check_sizes, fits_int
from anyflex_mps.backward_call import backward_workspace, launch_backward
from anyflex_mps.decode_call import decode_workspace, decodes, launch_decode, splits_of
from anyflex_mps.forward_call import launch_forward
from anyflex_mps.forward_matmul import ROWS, keys_of_step
from anyflex_mps.options import wants_mpp
from anyflex_mps.shaders import Shaders
from anyflex_mps.spec_shaders import SpecShaders
from anyflex_mps.tiles import tile_for

__all__ = ["MpsKernel"]


class MpsKernel(Kernel):
    """Chooses and launches the kernels of one spec."""

    def __init__(self, spec: Spec, shaders: Shaders, cores: int) -> None:
        self.spec = spec
        self._made = SpecShaders(spec, shaders, cores)
        self._wide = SpecShaders(replace(spec, index_width=64), shaders, cores)

    def _made_for(self, *tensors: Tensor | None) -> SpecShaders:
        """Return the kernels whose offsets hold these tensors' elements: ``Spec.index_width`` is
        that of query, key and value alone."""
        fit = all(tensor is None or fits_int(tensor) for tensor in tensors)
        return self._made if fit else self._wide

    def describe(self, call: Call) -> str:
        """Return ``decode splits=8``, ``prefill 32x32`` or ``prefill mpp 32x32``: rows by keys of
        a step."""
        if decodes(self.spec, call):
            return f"decode splits={splits_of(self.spec, call, self._made.cores).number}"
        if wants_mpp(self.spec):
            return f"prefill mpp {ROWS}x{keys_of_step(self.spec)}"
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
        """Fill `out`. Raises BackendRefused where `check_sizes` does."""
        check_sizes(call)
        made = self._made_for(out.out)
        if decodes(self.spec, call):
            launch_decode(made, call, out)
        else:
            launch_forward(made, call, out)

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        """Fill `grads`. Raises BackendRefused where `check_sizes` does."""
        check_sizes(call)
        if call.query.numel() == 0 or call.key.numel() == 0 or call.value.numel() == 0:
            for gradient in (grads.dq, grads.dk, grads.dv):
                if gradient is not None:
                    gradient.zero_()
            return
        made = self._made_for(saved.out, grad.dout, grads.dq, grads.dk, grads.dv)
        launch_backward(made, call, saved, grad, grads)
