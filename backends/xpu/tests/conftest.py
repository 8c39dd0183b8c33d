"""Fixtures: a simulated machine for tests that request one. Tests for owners of a GPU are skipped
elsewhere."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from machine import Machine

from anyflex.plugin import register
from anyflex_xpu.backend import XpuBackend

REAL = torch.xpu.is_available()

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "triton" / "tests"))
    from interpreting import hasten

    hasten()


def pytest_configure() -> None:
    if not any(point.name == "xpu" for point in entry_points(group="anyflex.backends.v1")):
        register("xpu", XpuBackend)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "no Intel GPU: torch.xpu.is_available() is False"
    for item in items:
        if not REAL and item.get_closest_marker("xpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    site = tmp_path / "site"
    site.mkdir()
    return Machine(monkeypatch, site)
