"""Kernel of a spec on Blackwell, where the user opts in to its forward: that forward where it
takes a call, else the portable kernels. Backward is always portable."""

from __future__ import annotations

from typing import Literal

from anyflex.plugin import Call, Outputs, TensorSpec
from anyflex_cuda.blackwell_call import (
    BLOCK_M,
    boxes_for,
    launch_forward,
    refused_spec,
    tiles_for,
)
from anyflex_cuda.forward_call import Fit, fit_of, refusal
from anyflex_cuda.gluon_kernels import FORWARD_OPTIONS, GluonPrograms, refused_options
from anyflex_triton.building import KernelInputs, TritonKernel

__all__ = ["BlackwellKernel"]


class BlackwellKernel(TritonKernel):
    """Chooses and launches the kernels of one spec."""

    def __init__(self, given: KernelInputs) -> None:
        super().__init__(given)
        spec, overrides = given.spec, given.overrides
        self._tiles = tiles_for(spec)
        self._refused = refused_options(overrides, FORWARD_OPTIONS) or refused_spec(spec)
        # Backward is portable, and its tanh is exact, so forward's must be too.
        self._fast_tanh = bool(overrides.get("fast_tanh")) and not spec.needs_backward
        self._blackwell = GluonPrograms(spec, given.source, self._fast_tanh, given.files)

    def describe(self, call: Call) -> str:
        """Return ``blackwell 256x128, never run by the project``, with ``fast tanh`` where that is
        taken, or the portable kernels' description and why they are taken."""
        portable = super().describe(call)
        if self._decodes(call):
            return portable
        reason = self._refused or refusal(call)
        if reason is not None:
            return f"{portable} (not Blackwell's kernel: {reason})"
        backward = ", backward portable" if self.spec.needs_backward else ""
        tiles = f"{BLOCK_M}x{self._tiles.block_n}"
        if self._fast_tanh and self._blackwell.is_coarse(call):
            tiles += " fast tanh"
        return f"blackwell {tiles}, never run by the project{backward}"

    def _fit(self, call: Call) -> Fit | None:
        """Return the call's fit for Blackwell's forward, or None where it doesn't take the
        call."""
        if self._refused is not None or self._decodes(call):
            return None
        return self._blackwell.kept_fit(call, self._fit_of)

    def _fit_of(self, call: Call) -> Fit | None:
        tiles = self._tiles
        return fit_of(self._blackwell, BLOCK_M, tiles.block_n, boxes_for(tiles, self.spec), call)

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        """Return a counter or nothing for Blackwell's forward, else the portable kernels'."""
        fit = self._fit(call) if direction == "forward" else None
        if fit is not None:
            return fit.workspace
        return super().workspace(call, direction)

    def forward(self, call: Call, out: Outputs) -> None:
        """Fill `out`."""
        fit = self._fit(call)
        if fit is not None:
            launch_forward(self._blackwell, self._tiles, fit, call, out)
        else:
            super().forward(call, out)
