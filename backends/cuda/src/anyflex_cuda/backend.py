"""The entry point: Hopper's kernels, and the portable ones for the rest."""

from __future__ import annotations

from pathlib import Path

import torch

from anyflex.plugin import Artifacts, Decision, Kernel, Rejected, Spec
from anyflex_triton.backend import TritonBackend, checksum_of

__all__ = ["CudaBackend"]


class CudaBackend(TritonBackend):
    """Takes what `cuda.triton` takes, on NVIDIA's GPUs."""

    # Nobody else is the default of this device type.
    priority = 0

    def probe(self) -> Decision:
        """Look for NVIDIA's GPU and for Triton, without starting either."""
        if torch.version.hip is not None:
            return Rejected("this torch is for AMD GPUs, whose kernels are cuda.triton's")
        return super().probe()

    def fingerprint(self) -> str:
        """The portable kernels' and this package's sources."""
        return f"{super().fingerprint()}, cuda sources {checksum_of(Path(__file__).parent):x}"

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        """As the portable one; on Hopper with its kernels."""
        if self.target() != "hopper":
            return super().compile(spec, artifacts)
        from anyflex_cuda.kernel import HopperKernel

        source, tuner = self.ingredients(spec, artifacts)
        return HopperKernel(spec, source, dict(spec.options), tuner)
