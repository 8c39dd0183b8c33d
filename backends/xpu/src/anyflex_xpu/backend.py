"""Entry point of the backend: the portable Triton kernels for Intel GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch

from anyflex.plugin import Accepted, Decision, Option, Rejected
from anyflex_triton import TritonBackend
from anyflex_xpu import ipex, probing

if TYPE_CHECKING:
    from anyflex_triton.building import Target

__all__ = ["XpuBackend"]

_GRF_MODES = ("default", "128", "256", "512", "auto")
_NEVER_RUN = (
    "the project has never run this backend on an Intel GPU; `anyflex conformance --backend xpu "
    "--require all` holds it to the contract on yours"
)


class XpuBackend(TritonBackend):
    """The portable kernels with Intel's configurations. They take what `cuda.triton` takes, and
    the option ``grf_mode`` too."""

    # No other backend is the default of this device type.
    priority = 0
    options: ClassVar[Mapping[str, Option]] = {
        **TritonBackend.options,
        "grf_mode": Option(
            str, None, "registers of a thread, as Intel's compiler has it", _GRF_MODES
        ),
    }

    def target(self) -> Target:
        """Return the target that selects Intel's entries of the config table."""
        return "xpu"

    def probe(self) -> Decision:
        """Look for an Intel GPU and for a Triton that compiles for it, without starting either."""
        reason = probing.missing()
        return Accepted() if reason is None else Rejected(reason)

    def fingerprint(self) -> str:
        """Return what the kernels depend on, Triton's flavour, and each device with its driver."""
        flavours = ", ".join(map(str, probing.triton_flavours())) or "triton of no distribution"
        parts = [super().fingerprint(), flavours, *dict.fromkeys(map(str, probing.devices()))]
        return "; ".join(part for part in parts if part)

    def notes(self) -> list[str]:
        """Return doctor's notes: missing matrix units, IPEX, what is untried."""
        lines = [
            f"{device.name} has no matrix units (DPAS): products run slowly on its vector units"
            for device in probing.devices()
            if not device.matrix_units
        ]
        lines += ipex.notes()
        if torch.xpu.is_available():
            lines.append(_NEVER_RUN)
        return lines
