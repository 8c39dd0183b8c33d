"""An empty registry and environment for each test, and the command line called in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from anyflex.cli.main import main
from anyflex.registry import isolated

__all__ = ["Outcome", "RunCommand"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of one command."""

    code: int
    out: str
    err: str


RunCommand = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("ANYFLEX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ANYFLEX_CACHE_DIR", str(tmp_path / "cache"))
    with isolated():
        yield


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Run ``anyflex`` with these arguments."""

    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
