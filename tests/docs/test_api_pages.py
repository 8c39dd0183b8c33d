"""The reference pages show every public name, and no other."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from anyflex import errors

DOCS = Path(__file__).resolve().parents[2] / "docs" / "api"
PAGES = {
    "anyflex": "anyflex",
    "anyflex.errors": "errors",
    "anyflex.masks": "masks",
    "anyflex.mods": "mods",
    "anyflex.plugin": "plugin",
    "anyflex.testing": "testing",
}
"""Pages of public modules, by the module's name."""
ENTRY = re.compile(r"^::: ([\w.]+)$", flags=re.MULTILINE)


@pytest.mark.parametrize(("name", "page"), PAGES.items())
def test_a_page_shows_each_public_name_once(name: str, page: str) -> None:
    entries = ENTRY.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))
    wanted = {f"{name}.{each}" for each in importlib.import_module(name).__all__}
    if name != "anyflex.errors":  # which shows them for all modules
        wanted -= {f"{name}.{each}" for each in errors.__all__}
    wanted -= {f"anyflex.{each}" for each in ("masks", "mods")}  # modules, with pages of their own
    assert sorted(entries) == sorted(wanted)


def test_errors_that_plugins_raise_are_named_on_their_page() -> None:
    text = (DOCS / "plugin.md").read_text(encoding="utf-8")
    held = set(vars(importlib.import_module("anyflex.plugin"))) & set(errors.__all__)
    assert held and all(f"`{name}`" in text for name in held)


def test_every_page_has_its_module() -> None:
    assert {path.stem for path in DOCS.glob("*.md")} == set(PAGES.values())
