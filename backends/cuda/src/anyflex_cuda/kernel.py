"""A spec compiled for Hopper: its own kernels where they take a call, else the portable ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from anyflex.plugin import Call, GradInputs, Grads, Outputs, Saved, Spec, TensorSpec
from anyflex_cuda.backward_call import (
    backward_workspace,
    hopper_launches,
    makes_dq,
    refused_backward,
    work_of,
)
from anyflex_cuda.boxed_forward import refusal, workspace
from anyflex_cuda.forward_call import launch_forward, refused_spec, tiles_for
from anyflex_cuda.gluon_program import is_boxed
from anyflex_cuda.gluon_programs import GluonPrograms
from anyflex_cuda.portable_options import BACKWARD_OPTIONS, FORWARD_OPTIONS, refused_options
from anyflex_triton.backward_captured import integer_specs
from anyflex_triton.configs import Target
from anyflex_triton.kernel import TritonKernel, cut
from anyflex_triton.launch import launch_all
from anyflex_triton.tuning import Tuner

__all__ = ["CudaKernel"]


class CudaKernel(TritonKernel):
    """Chooses and launches.

    Args:
        spec, source, target, overrides, tuner: as `TritonKernel`'s.
    """

    def __init__(
        self,
        spec: Spec,
        source: str,
        target: Target,
        overrides: Mapping[str, Any],
        tuner: Tuner | None,
    ) -> None:
        super().__init__(spec, source, target, overrides, tuner)
        unproven = bool(overrides.get("unproven"))
        self._tiles = tiles_for(spec, unproven)
        self._refused = refused_options(overrides, FORWARD_OPTIONS) or refused_spec(
            spec, self._tiles, unproven
        )
        self._refused_backward = refused_options(overrides, BACKWARD_OPTIONS) or refused_backward(
            spec, unproven
        )
        self._hopper = GluonPrograms(spec, source, overrides)

    def describe(self, call: Call) -> str:
        """``hopper 128x128``, or what the portable kernels say and why they are taken; where
        gradients are wanted, then the same of backward: ``backward hopper``."""
        forward = self._describe_forward(call)
        if not self.spec.needs_backward:
            return forward
        reason = self._refused_backward or refusal(call)
        if reason is not None:
            return f"{forward}, backward portable (not Hopper's kernel: {reason})"
        rest = ", dq portable" if "q" in self.spec.gradients and not makes_dq(self.spec) else ""
        return f"{forward}, backward hopper{rest}"

    def _describe_forward(self, call: Call) -> str:
        portable = super().describe(call)
        if self._decodes(call):
            return portable
        reason = self._refused or refusal(call)
        if reason is not None:
            return f"{portable} (not Hopper's kernel: {reason})"
        return f"hopper {self._tiles.block_m}x{self._tiles.block_n}"

    def _is_hoppers(self, call: Call) -> bool:
        """Whether forward takes Hopper's kernel."""
        return self._refused is None and not self._decodes(call) and refusal(call) is None

    def _is_hoppers_backward(self, call: Call) -> bool:
        """Whether backward takes Hopper's kernel."""
        return self._refused_backward is None and refusal(call) is None

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        """Of Hopper's forward a counter; of its backward `backward_workspace`, then what the
        portable pass over query rows takes where that makes dQ; else as the portable kernels'."""
        if direction == "forward" and self._is_hoppers(call):
            return workspace()
        if direction == "forward" or not self._is_hoppers_backward(call):
            return super().workspace(call, direction)
        ours = backward_workspace(self.spec, call)
        if makes_dq(self.spec):
            return ours
        return (*ours, *self._finer_specs(call, "queries"), *integer_specs(self._made, call))

    def forward(self, call: Call, out: Outputs) -> None:
        """Fill `out`."""
        if self._is_hoppers(call):
            launch_forward(self._hopper, self._tiles, call, out)
        else:
            super().forward(call, out)

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        """Fill `grads`."""
        if not self._is_hoppers_backward(call):
            super().backward(call, saved, grad, grads)
            return
        if not is_boxed(grad.dout):
            # Often a sum's, broadcast. No workspace: that is asked for before dout is there.
            grad = GradInputs(grad.dout.contiguous(), grad.dlse, grad.delta)
        ours, rest = cut(list(grads.workspace), len(backward_workspace(self.spec, call)))
        work = work_of(ours)
        launches = hopper_launches(self._made, self._hopper, call, saved, grad, grads, work)
        if work.dq_sums is None:
            finer, integers = cut(rest, len(self._finer_specs(call, "queries")))
            launches += self.query_launches(
                call, grad.dout, work.row_values, grads, finer, integers, launches[:1]
            )
        launch_all(launches, call.query.device)
