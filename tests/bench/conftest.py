"""An empty registry and environment for each test, and peers that need no compiler."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anyflex.cli.main import main
from anyflex.registry import isolated

__all__ = ["Bench"]

Bench = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("ANYFLEX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ANYFLEX_CACHE_DIR", str(tmp_path / "cache"))
    with isolated():
        yield


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Run ``anyflex bench`` with these arguments; return the exit status and the report."""

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "results.json"
        code = main(["bench", *arguments, "--rounds", "3", "--json", str(file)])
        capsys.readouterr()
        return code, json.loads(file.read_text(encoding="utf-8"))

    return run
