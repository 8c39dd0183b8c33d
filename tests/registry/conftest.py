"""An empty registry for each test, without the user's environment."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from anyflex.registry import isolated
from anyflex.registry.backend_table import Table
from tests.registry.stubs import Reference

__all__: list[str] = []


@pytest.fixture(autouse=True)
def clean_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name in list(os.environ):
        if name.startswith("ANYFLEX_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ANYFLEX_CACHE_DIR", str(tmp_path_factory.mktemp("cache") / "anyflex"))


@pytest.fixture(autouse=True)
def registry(clean_environment: None) -> Iterator[Table]:
    """A registry without installed plugins, whose reference is a stub."""
    with isolated(reference=Reference) as table:
        yield table
