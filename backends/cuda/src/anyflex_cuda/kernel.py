"""A compiled spec: Hopper's kernels where they take a call, else the portable ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from anyflex.plugin import Call, Outputs, Spec, TensorSpec
from anyflex_cuda.forward_call import launch_forward, refusal, refused_spec, tiles_for, workspace
from anyflex_cuda.gluon_programs import GluonPrograms
from anyflex_triton.configs import Target
from anyflex_triton.kernel import TritonKernel
from anyflex_triton.tuning import Tuner

__all__ = ["CudaKernel"]


class CudaKernel(TritonKernel):
    """Chooses and launches.

    Args:
        spec, source, target, overrides, tuner: as `TritonKernel`'s.
        hopper: whether Hopper's kernels may be taken.
    """

    def __init__(
        self,
        spec: Spec,
        source: str,
        target: Target,
        overrides: Mapping[str, Any],
        tuner: Tuner | None,
        hopper: bool,
    ) -> None:
        super().__init__(spec, source, target, overrides, tuner)
        self._refused = refused_spec(spec) if hopper else None
        taken = hopper and self._refused is None
        self._hopper = GluonPrograms(spec, source, overrides) if taken else None

    def describe(self, call: Call) -> str:
        """``hopper 128x128``, or what the portable kernels say and why they are taken."""
        portable = super().describe(call)
        reason = self._refused
        if self._hopper is not None and reason is None:
            reason = refusal(call)
        if self._decodes(call) or (self._hopper is None and reason is None):
            return portable
        if reason is not None:
            return f"{portable} (not Hopper's kernel: {reason})"
        tiles = tiles_for(self.spec)
        return f"hopper {tiles.block_m}x{tiles.block_n}"

    def _is_hoppers(self, call: Call) -> bool:
        """Whether forward takes Hopper's kernel."""
        return self._hopper is not None and not self._decodes(call) and refusal(call) is None

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        """Of Hopper's forward a counter, else as the portable kernels'."""
        if direction == "forward" and self._is_hoppers(call):
            return workspace()
        return super().workspace(call, direction)

    def forward(self, call: Call, out: Outputs) -> None:
        """Fill `out`."""
        if self._hopper is not None and self._is_hoppers(call) and out.out.numel() != 0:
            launch_forward(self._hopper, call, out)
        else:
            super().forward(call, out)
