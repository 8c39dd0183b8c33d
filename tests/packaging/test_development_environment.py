"""Which torch `make` puts into `.venv`."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.development_environment import choose_torch, constraint_lines


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


def test_the_development_pins_name_no_address() -> None:
    assert not [line for line in constraint_lines() if "/" in line or "--" in line]
