"""A spec compiled for Blackwell, where the user asks for its own forward: that where it takes a
call, else the portable kernels. Backward is the portable kernels'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from anyflex.plugin import Call, Outputs, Spec, TensorSpec
from anyflex_cuda.blackwell_call import BLOCK_M, launch_forward, refused_spec, tiles_for
from anyflex_cuda.boxed_forward import refusal, workspace
from anyflex_cuda.gluon_programs import GluonPrograms
from anyflex_cuda.portable_options import FORWARD_OPTIONS, refused_options
from anyflex_triton.configs import Target
from anyflex_triton.kernel import TritonKernel
from anyflex_triton.tuning import Tuner

__all__ = ["BlackwellKernel"]


class BlackwellKernel(TritonKernel):
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
        self._tiles = tiles_for(spec)
        self._refused = refused_options(overrides, FORWARD_OPTIONS) or refused_spec(spec)
        self._blackwell = GluonPrograms(spec, source, overrides)

    def describe(self, call: Call) -> str:
        """``blackwell 256x128, never run by the project``, or what the portable kernels say and
        why they are taken."""
        portable = super().describe(call)
        if self._decodes(call):
            return portable
        reason = self._reason(call)
        if reason is not None:
            return f"{portable} (not Blackwell's kernel: {reason})"
        backward = ", backward portable" if self.spec.needs_backward else ""
        tiles = f"{BLOCK_M}x{self._tiles.block_n}"
        return f"blackwell {tiles}, never run by the project{backward}"

    def _reason(self, call: Call) -> str | None:
        """Why a call that isn't decoded takes the portable forward, or None."""
        return self._refused or refusal(call)

    def _is_blackwells(self, call: Call) -> bool:
        """Whether forward takes Blackwell's kernel."""
        return not self._decodes(call) and self._reason(call) is None

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        """Of Blackwell's forward a counter; else as the portable kernels'."""
        if direction == "forward" and self._is_blackwells(call):
            return workspace()
        return super().workspace(call, direction)

    def forward(self, call: Call, out: Outputs) -> None:
        """Fill `out`."""
        if self._is_blackwells(call):
            launch_forward(self._blackwell, self._tiles, call, out)
        else:
            super().forward(call, out)
