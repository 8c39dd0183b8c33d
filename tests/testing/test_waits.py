"""A case of waiting names the lines of a backend that wait."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from anyflex.testing.cases import devices


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Modes of torch's sync debug that are set, in order: 1 before."""
    modes: list[object] = []

    def set_mode(mode: object) -> None:
        modes.append(mode)
        # As at the first call in a process.
        warnings.warn("it does not yet detect all synchronizing operations", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return modes


def test_lines_that_wait_are_named_once(modes: list[object]) -> None:
    def call() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another one's", stacklevel=1)

    line = call.__code__.co_firstlineno + 2
    assert devices._waits_of(torch.device("cuda"), call) == (
        f"; by torch's sync debug mode, in {Path(__file__).name}:{line}"
    )
    assert modes == ["warn", 1]


def test_torch_may_know_of_none(modes: list[object]) -> None:
    said = devices._waits_of(torch.device("cuda"), lambda: None)
    assert said.startswith("; by torch's sync debug mode, in no line")
    assert devices._waits_of(torch.device("xpu"), lambda: None) == ""
    assert modes == ["warn", 1]


def test_the_mode_is_the_users_again_after_a_failure(modes: list[object]) -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        devices._waits_of(torch.device("cuda"), fail)
    assert modes == ["warn", 1]
