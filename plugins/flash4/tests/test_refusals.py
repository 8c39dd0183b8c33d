"""Answers of `cuda.flash4` to specs: CPU tensors stand in for the device, nothing is computed."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest
import torch
from anyflex_flash4.backend import Flash4
from stand_in import install

import anyflex
from anyflex.plugin import Accepted, Rejected
from anyflex.testing import posing


def explained(
    *, arch: str = "sm_90", dtype: torch.dtype = torch.bfloat16, width: int = 64, **more: object
) -> str:
    query = torch.empty(1, 4, 256, width, dtype=dtype, requires_grad=True)
    with posing("cuda", arch=arch):
        found = anyflex.explain(query, query, query, backend="cuda.flash4", **more)
    return str(found)


def mask_of(size: int | tuple[int, int]) -> anyflex.BlockMask:
    return anyflex.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, 256, 256, BLOCK_SIZE=size
    )


def test_training_with_mods_and_masks_is_taken() -> None:
    slopes = torch.zeros(4)
    for size in (128, (256, 128), 48):
        query = torch.empty(1, 4, 256, 64, dtype=torch.float16, requires_grad=True)
        with posing("cuda", arch="sm_90"):
            found = anyflex.explain(
                query,
                query,
                query,
                lambda s, b, h, q, k: s + slopes[h],
                mask_of(size),
                backend="cuda.flash4",
            )
        assert found.to_dict()["backend"] == "cuda.flash4"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"dtype": torch.float32}, "dtype float32 is not supported"),
        ({"width": 160}, "head dim E = 160 is not supported"),
        ({"width": 72}, "head dim E = 72 is not supported"),
        ({"arch": "sm_100"}, "architecture sm_100; cuda.flash4 was tried on sm_90"),
        ({"return_aux": anyflex.AuxRequest(max_scores=True)}, "max_scores is not supported"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(
    call: dict[str, object], reason: str
) -> None:
    assert reason in explained(**call)


def test_captured_tensors_that_learn_are_refused() -> None:
    slopes = torch.zeros(4, requires_grad=True)
    found = explained(score_mod=lambda s, b, h, q, k: s + slopes[h])
    assert "the gradient of captured is not supported" in found


def test_repeatable_gradients_are_refused() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert "gradients that repeat bit for bit" in explained()
    finally:
        torch.use_deterministic_algorithms(False)


class TestProbe:
    @pytest.fixture(autouse=True)
    def a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        self.patch = monkeypatch
        self.folders: dict[str, list[str]] = {}
        monkeypatch.setattr(importlib.util, "find_spec", self.find_spec)

    def find_spec(self, name: str) -> importlib.machinery.ModuleSpec | None:
        if name not in self.folders:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = self.folders[name]
        return spec

    def probed(self) -> str:
        decision = Flash4("cuda.flash4", "cuda").probe()
        return decision.reason if isinstance(decision, Rejected) else "accepted"

    def test_no_device_is_named(self) -> None:
        self.patch.setattr(torch.cuda, "is_available", lambda: False)
        assert "no CUDA device" in self.probed()

    def test_the_missing_package_is_named_with_the_cure(self) -> None:
        assert self.probed() == (
            "the package flash-attn-4 is not installed: pip install 'flash-attn-4[cu13]'"
        )

    def test_another_flash_attention_is_told_apart(self, tmp_path: Path) -> None:
        self.folders = {"flash_attn": [str(tmp_path)]}
        assert "it is another FlashAttention" in self.probed()

    def test_cutlass_is_looked_for(self, tmp_path: Path) -> None:
        (tmp_path / "cute").mkdir()
        self.folders = {"flash_attn": [str(tmp_path)]}
        assert "pip install 'nvidia-cutlass-dsl[cu13]'" in self.probed()
        self.folders["cutlass"] = []
        assert self.probed() == "accepted"

    def test_a_gpu_that_runs_already_is_asked_what_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "cute").mkdir()
        self.folders = {"flash_attn": [str(tmp_path)], "cutlass": []}
        self.patch.setattr(torch.cuda, "is_initialized", lambda: True)
        for capability, answer in (((9, 0), "accepted"), ((8, 0), "architecture sm_80")):
            self.patch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
            assert answer in self.probed()


def test_it_is_a_peer_and_never_chosen() -> None:
    assert Flash4.priority < 0
    assert isinstance(Flash4("cuda.flash4", "cuda").supports.__self__, Flash4)


def test_a_kernel_is_made_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    query = torch.ones(1, 1, 4, 64, dtype=torch.bfloat16)
    with posing("cuda", arch="sm_90"):
        out = anyflex.flex_attention(query, query, query, backend="cuda.flash4")
    assert torch.equal(out, query) and isinstance(Accepted(), Accepted)
