"""Committed results: pages with their commands, pictures, and small data; no samples."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "bench" / "results"
PAGES = sorted(RESULTS.glob("*.md"))
KIB = 1024
LIMITS = {".json": 64 * KIB, ".md": 128 * KIB, ".svg": 128 * KIB}
"""Bytes that a file of each kind may have."""


def test_results_are_small_files_of_known_kinds() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= set(LIMITS)
    large = [path.name for path in files if path.stat().st_size > LIMITS[path.suffix]]
    assert not large, "samples belong into build/results, which git ignores"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_of_results_names_the_command_that_makes_it(page: Path) -> None:
    # Lines break inside of a command, too.
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert re.search(r"`(python bench/\w+\.py|anyflex bench|make bench)", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_of_results_names_data_and_pages_that_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    # In backticks: FILE and REPORT stand for a reader's own.
    names = re.findall(r"`((?:h[12]00|cpu|front|block|triton)_\w+\.(?:json|md|svg))`", text)
    names += re.findall(r"\]\((\w+\.(?:json|md|svg))\)", text)
    assert [name for name in names if not (RESULTS / name).is_file()] == []


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_data_is_json(file: Path) -> None:
    assert json.loads(file.read_text(encoding="utf-8"))
