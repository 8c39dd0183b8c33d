"""The example meets other versions of core, and core other versions of the example."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import anyflex
from anyflex.plugin import isolated
from anyflex.registry import registered_backend
from anyflex.registry.doctor_report import backend_rows
from tests.plugins.installed import EXAMPLE, entry_points
from tests.registry.packages import install

POINTS = entry_points(EXAMPLE)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on ``sys.path``, and the example's sources; imports from it are forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ANYFLEX_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("anyflex_example"):
            del sys.modules[name]


def attend() -> torch.Tensor:
    q = torch.ones(1, 1, 4, 4)
    out: torch.Tensor = anyflex.flex_attention(q, q, q, backend="cpu.example")
    return out


def speak(monkeypatch: pytest.MonkeyPatch, oldest: int, current: int) -> None:
    """Make core speak contracts `oldest` to `current`."""
    monkeypatch.setattr(registered_backend, "CONTRACT_MIN", oldest)
    monkeypatch.setattr(registered_backend, "CONTRACT", current)


def refused_unloaded(says: str) -> None:
    with isolated(scan=True):
        with pytest.raises(anyflex.PluginError, match=says):
            attend()
        (row,) = (row for row in backend_rows() if row.name == "cpu.example")
        assert row.state == "incompatible"
    assert "anyflex_example" not in sys.modules


def test_a_plugin_of_this_contract_computes(site: Path) -> None:
    install(site, "anyflex-example", POINTS)
    with isolated(scan=True):
        assert torch.equal(attend(), torch.ones(1, 1, 4, 4))


def test_a_newer_plugin_is_listed_and_not_imported(site: Path) -> None:
    install(site, "anyflex-example", POINTS.replace("v1", "v2"))
    refused_unloaded("it is written for contract 2, this is 1; upgrade anyflex")


def test_a_newer_core_still_speaks_the_old_contract(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "anyflex-example", POINTS)
    speak(monkeypatch, 1, 2)
    with isolated(scan=True):
        assert torch.equal(attend(), torch.ones(1, 1, 4, 4))


def test_a_core_that_has_left_the_old_contract_says_so(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "anyflex-example", POINTS)
    speak(monkeypatch, 2, 3)
    refused_unloaded("it is written for contract 1, this is 2 to 3; upgrade the plugin")


@pytest.mark.parametrize("core", [1, 2])
def test_a_plugin_may_serve_two_contracts(
    core: int, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = POINTS.replace("v1", f"v{3 - core}").replace("anyflex_example", "none_such")
    install(site, "anyflex-example", POINTS.replace("v1", f"v{core}") + other)
    speak(monkeypatch, core, core)
    with isolated(scan=True):
        assert torch.equal(attend(), torch.ones(1, 1, 4, 4))
