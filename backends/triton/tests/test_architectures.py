"""Which GPUs are taken, by the architecture that a spec names."""

from __future__ import annotations

import pytest
import torch

from anyflex.plugin import Accepted, Rejected, Spec
from anyflex_triton.backend import TritonBackend


@pytest.mark.parametrize(
    ("arch", "taken"), [("sm_75", False), ("sm_80", True), ("sm_120", True), ("gfx942", True)]
)
def test_gpus_that_triton_compiles_for_are_taken(arch: str, taken: bool) -> None:
    decision = TritonBackend("cuda.triton", "cuda").supports(
        Spec("cuda", arch, torch.float16, 64, 64)
    )
    if taken:
        assert isinstance(decision, Accepted)
    else:
        assert isinstance(decision, Rejected)
        assert decision.reason == (
            "a GPU of architecture sm_75; Triton compiles for sm_80 and above"
        )
