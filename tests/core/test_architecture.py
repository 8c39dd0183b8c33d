"""Names of architectures in specs: chips of one device type that differ are told apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from anyflex.tensors.tensor_facts import architecture

CHIPS = [
    ("Apple M1", "apple7"),
    ("Apple M1 Ultra", "apple7"),
    ("Apple M2 Max", "apple8"),
    ("Apple M3", "apple9"),
    ("Apple M4 Pro", "apple9"),
    ("Apple M5", "apple10"),
    ("Apple A18 Pro", "apple9"),
    # No chip that is known now: neither the family of M1 nor that of its predecessor.
    ("Apple M6 Pro", "apple-m6-pro"),
    ("Apple M10", "apple-m10"),
    ("Apple Paravirtual device", "apple-paravirtual-device"),
    ("AMD Radeon Pro 5500M", "amd-radeon-pro-5500m"),
]


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    architecture.cache_clear()
    yield
    architecture.cache_clear()


@pytest.mark.parametrize(("chip", "arch"), CHIPS)
def test_an_apple_gpu_is_named_by_its_family(
    chip: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: chip)
    assert architecture(torch.device("mps", 0)) == arch


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has an Apple GPU")
def test_an_absent_apple_gpu_has_no_name() -> None:
    assert architecture(torch.device("mps")) == ""


def test_a_cpu_has_no_name() -> None:
    assert architecture(torch.device("cpu")) == ""
