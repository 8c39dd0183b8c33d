"""Families of architectures, and what a machine says of its GPU."""

from __future__ import annotations

import platform

import pytest
import torch

from anyflex_mps.targets import NEWEST, cores, family_of, machine

FAMILIES = [
    ("apple7", 7),
    ("apple8", 8),
    ("apple9", 9),
    ("apple10", 10),
    # Newer than all that is known: as the newest, which has what its predecessors have.
    ("apple11", NEWEST),
    ("apple-m6-pro", NEWEST),
    ("apple-m12", NEWEST),
    ("apple-a20-pro", NEWEST),
    ("", NEWEST),
    ("apple6", None),
    ("apple-a12z", None),
    ("apple-a13", None),
    ("apple-paravirtual-device", None),
    ("amd-radeon-pro-5500m", None),
]


@pytest.mark.parametrize(("arch", "family"), FAMILIES)
def test_each_architecture_has_its_family(arch: str, family: int | None) -> None:
    assert family_of(arch) == family


def _pose_as_mac(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M4 Pro")
    monkeypatch.setattr(torch.backends.mps, "get_core_count", lambda: count)
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))


@pytest.mark.parametrize(("told", "expected"), [(20, 20), (0, 10)])
def test_cores_are_torchs_count_or_those_of_a_small_mac(
    told: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pose_as_mac(monkeypatch, told)
    assert cores() == expected


def test_a_report_names_chip_system_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    _pose_as_mac(monkeypatch, 20)
    assert machine() == f"Apple M4 Pro, macOS 15.1, torch {torch.__version__}"


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has an Apple GPU")
def test_without_an_apple_gpu_a_report_says_so() -> None:
    assert machine().startswith("no Apple GPU, ")
    assert cores() == 10
