"""Entry point of the backend: Hopper's kernels, and the portable ones for the rest."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from anyflex.plugin import Decision, Kernel, Option, Rejected
from anyflex_triton import ReadyKernels, TritonBackend, checksum_of, untried_triton

if TYPE_CHECKING:
    from anyflex_triton.building import KernelInputs

__all__ = ["READY", "VARIABLE", "CudaBackend"]

READY = Path(__file__).with_name("ready_kernels.zip")
"""Archive of compiled kernels, which `make wheels` makes."""

VARIABLE = "ANYFLEX_CUDA_BLACKWELL"
"""Variable that opts in to Blackwell's forward."""


class CudaBackend(TritonBackend):
    """Backend for NVIDIA's GPUs, which takes what `cuda.triton` takes."""

    # No other backend is the default of this device type.
    priority = 0
    options: ClassVar[Mapping[str, Option]] = {
        **TritonBackend.options,
        "hopper": Option(
            bool, True, "Hopper's own kernels, or Blackwell's, where they take a call"
        ),
        "fast_tanh": Option(
            bool,
            False,
            "soft caps of Hopper's own kernels may take the GPU's instruction for tanh: scores "
            "are then off by 2^-11 of the cap",
        ),
    }

    def probe(self) -> Decision:
        """Look for NVIDIA's GPU and for Triton, without starting either."""
        if torch.version.hip is not None:
            return Rejected("this torch is for AMD GPUs, whose kernels are cuda.triton's")
        return super().probe()

    def notes(self) -> list[str]:
        """Return doctor's notes: which versions of Triton were tried, and why Hopper's and
        Blackwell's kernels aren't taken."""
        lines = super().notes() + [line for line in (unread_value(),) if line is not None]
        if self.target() == "hopper":
            lines.append(self.ready_kernels().note())
        try:
            # Damaged metadata has no version.
            reason = untried_triton(importlib.metadata.version("triton") or "of no version")
        except importlib.metadata.PackageNotFoundError:
            # `probe` reports a missing Triton.
            return lines
        if reason is not None:
            lines.append(f"Hopper's and Blackwell's kernels aren't taken: {reason}")
        elif self.target() == "blackwell":
            refused = blackwell_refused()
            lines.append(
                f"Blackwell's forward is taken, and was never run by the project: {VARIABLE}=1"
                if refused is None
                else f"Blackwell's forward isn't taken: {refused}"
            )
        return lines

    def fingerprint(self) -> str:
        """Return checksums of the portable kernels' and this package's sources."""
        return f"{super().fingerprint()}, cuda sources {checksum_of(Path(__file__).parent):x}"

    def ready_kernels(self) -> ReadyKernels:
        """Return Hopper's kernels of ready-made masks and mods."""
        return ReadyKernels(READY, self.fingerprint())

    def kernel(self, given: KernelInputs) -> Kernel:
        """Return Hopper's kernels with the portable ones on a Hopper, Blackwell's forward with
        them on a Blackwell where the user opts in, else the portable ones. Gluon is imported only
        where its kernels may be taken, from a version of Triton that was tried."""
        import triton

        if given.target not in ("hopper", "blackwell"):
            return super().kernel(given)
        whose = "Hopper's" if given.target == "hopper" else "Blackwell's"
        reason = untried_triton(triton.__version__)
        if given.target == "blackwell":
            reason = blackwell_refused() or reason
        if not given.overrides.get("hopper", True):
            reason = "its option hopper is False"
        elif given.spec.dropout:
            reason = "it doesn't drop weights"
        elif given.spec.batch_invariant:
            # Hopper's kernels share out the keys of all sequences.
            reason = "its sums depend on the other sequences, and batch_invariant=True"
        if reason is not None:
            return super().kernel(given._replace(note=f" (not {whose} kernel: {reason})"))
        if given.target == "blackwell":
            from anyflex_cuda.blackwell_call import BlackwellKernel

            return BlackwellKernel(given)
        from anyflex_cuda.kernel import CudaKernel

        return CudaKernel(given)


def blackwell_refused() -> str | None:
    """Return why no spec takes Blackwell's forward, which has never run on a device, or None where
    the user asks for it."""
    if os.environ.get(VARIABLE) == "1":
        return None
    return f"compiled, and never run by the project; {VARIABLE}=1 takes it"


def unread_value() -> str | None:
    """Return doctor's note on an invalid value of the variable, or None."""
    text = os.environ.get(VARIABLE, "")
    if text in ("", "0", "1"):
        return None
    return f"{VARIABLE}={text!r} is not 0 or 1, and counts as unset"
