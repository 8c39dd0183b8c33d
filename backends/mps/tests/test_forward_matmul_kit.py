"""The conformance kit on a forward whose products are those of matrix units, in layouts at random.

Few of the kit's calls are in 16 bits and none is meant for an M5, so float32 runs there too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated_backend import SCHEDULE, drawn_schedule
from matrix_units import Forced, Shuffled
from soak import SOAK

from anyflex.testing import Conformance


class TestOnMatrixUnits(Conformance):
    backend = "mps"
    backend_class = Forced
    device = "cpu"
    require = ("forward", "backward", "decode")
    quick = True
    cases = (
        (
            "forward/*", "decode/*", "structure/*", "inputs/*", "large_scores/*", "aux/*",
            "shapes/[!m]*", "run_time/*",
        )
        if SOAK
        else (
            "forward/*", "structure/dead_then_live*", "inputs/nan_in_dead_keys",
            "large_scores/raised", "run_time/index_offsets",
        )
    )  # fmt: skip

    @pytest.fixture(autouse=True)
    def schedule(self, conformance_case: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(SCHEDULE, drawn_schedule(conformance_case))


class InHalves(Shuffled):
    """Backend whose plainest call is in float16, so that the kit's options are honoured."""

    capabilities = replace(
        Shuffled.capabilities, dtypes=frozenset({torch.float16, torch.bfloat16})
    )


class TestOptions(Conformance):
    backend = "mps"
    backend_class = InHalves
    device = "cpu"
    require = ("all",)
    quick = False
    cases = ("options/*",)
