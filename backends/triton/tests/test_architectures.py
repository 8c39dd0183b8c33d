"""Architectures of a spec: which GPUs are accepted."""

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


@pytest.mark.parametrize(
    ("hip", "sees", "triton", "reason"),
    [
        (None, True, True, None),
        (
            None, False, True,
            "torch sees no CUDA device; install its driver and a torch for CUDA (for an AMD GPU "
            "one for ROCm)",
        ),
        ("6.4", False, True, "torch sees no AMD GPU; install AMD's driver for it, amdgpu"),
        (None, True, False, "the package triton is not installed: pip install triton"),
        (
            "6.4", True, False,
            "no Triton is installed; torch's ROCm index has the one for AMD GPUs, "
            "pytorch-triton-rocm: install torch from there again",
        ),
        ("6.4", True, True, None),
    ],
)  # fmt: skip
def test_what_is_missing_is_told_with_this_torch_s_cure(
    hip: str | None, sees: bool, triton: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if triton else None)
    decision = TritonBackend("cuda.triton", "cuda").probe()
    assert (decision.reason if isinstance(decision, Rejected) else None) == reason
