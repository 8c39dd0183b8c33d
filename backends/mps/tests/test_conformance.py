"""The conformance kit on kernels that run in the emulator's race build."""

from __future__ import annotations

from emulated_backend import Emulated
from soak import SOAK

from anyflex.testing import Conformance


class TestEmulated(Conformance):
    backend = "mps"
    backend_class = Emulated
    device = "cpu"
    require = ("forward", "backward", "decode")
    quick = True
    cases = (
        ()
        if SOAK
        else (
            "forward/*", "backward/*_and_lse", "decode/*", "gradients/*", "inputs/*nan*",
            "aux/none_dout", "aux/lse_and_max_scores_dlse", "shapes/gqa_*", "shapes/lengths_*",
            "structure/dead_*", "structure/per_batch*", "large_scores/*", "determinism/mode",
            "run_time/index_offsets",
        )
    )  # fmt: skip
