"""Choice of the torch that `make` puts into `.venv`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import development_environment
from scripts.development_environment import (
    FACTS_PROGRAM,
    choose_torch,
    constraint_lines,
    constraints_beside,
)


def facts(torch: str | None) -> dict[str, Any]:
    return {"torch": torch, "prefix": "somewhere"}


@pytest.fixture(autouse=True)
def no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH", raising=False)


def test_without_a_torch_the_pinned_one_is_installed() -> None:
    words, requirement, reuse = choose_torch(facts(None))
    assert not reuse
    assert requirement == [words]
    assert words in constraint_lines()


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "3.0.0a1"])
def test_the_torch_of_the_invoking_python_is_reused(version: str) -> None:
    _, requirement, reuse = choose_torch(facts(version))
    assert reuse
    assert requirement == [f"torch=={version}"]


def test_a_torch_that_is_too_old_is_not_reused() -> None:
    _, requirement, reuse = choose_torch(facts("2.10.1"))
    assert not reuse
    assert requirement != ["torch==2.10.1"]


def test_a_named_torch_goes_before_the_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH", "torch==2.12.0 --pre")
    assert choose_torch(facts("2.13.0"))[1:] == (["torch==2.12.0", "--pre"], False)


def test_the_newest_torch_is_asked_for_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH", "newest")
    monkeypatch.setattr(development_environment, "newest_torch", lambda: "9.8.7")
    assert choose_torch(facts("2.13.0")) == ("torch==9.8.7", ["torch==9.8.7"], False)


def test_the_development_pins_name_no_address() -> None:
    assert not [line for line in constraint_lines() if "/" in line or "--" in line]


def test_a_triton_that_torch_brought_is_not_pinned_to_another() -> None:
    beside = constraints_beside({"torch": "2.13.0+xpu", "brings_triton": "triton-xpu"})
    assert "torch==2.13.0+xpu" in beside
    assert not [line for line in beside if line.startswith("triton")]
    alone = constraints_beside({"torch": "2.13.0+cpu", "brings_triton": None})
    assert [line for line in alone if line.startswith("triton==")]
    assert [line for line in alone if line.startswith("torch")] == ["torch==2.13.0+cpu"]


@pytest.mark.parametrize(
    ("requirement", "brings"),
    [
        ("triton-xpu==3.7.2", "triton-xpu"),
        ("triton==3.7.1; platform_system == 'Linux'", "triton"),
        ("numpy; extra == 'triton'", None),
        ("triton; extra == 'compile'", None),
    ],
)
def test_a_torch_that_asks_for_a_triton_is_found_out(
    requirement: str, brings: str | None, tmp_path: Path
) -> None:
    metadata = tmp_path / "torch-2.13.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\nRequires-Dist: {requirement}\n"
    )
    (tmp_path / "torch.py").touch()
    printed = subprocess.run(
        [sys.executable, "-c", FACTS_PROGRAM],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        check=True,
    ).stdout
    facts = json.loads(printed)
    assert (facts["torch"], facts["brings_triton"]) == ("2.13.0", brings)
