"""The table of files in a package's README names each of its modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

BACKENDS = Path(__file__).parents[2] / "backends"
HEAD = "| File | Holds |"
READMES = [page for page in sorted(BACKENDS.glob("*/README.md")) if HEAD in page.read_text()]


def test_the_packages_with_a_table_are_found() -> None:
    assert {page.parent.name for page in READMES} >= {"cpu", "cuda", "xpu", "mps"}


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.parent.name)
def test_the_table_of_files_names_every_module(page: Path) -> None:
    table = page.read_text().partition(HEAD)[2].partition("\n\n")[0]
    files = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `src/")]
    named = [name for cell in files for name in re.findall(r"`(?:src/\w+/)?(\w+\.py)`", cell)]
    modules = {path.name for path in page.parent.glob("src/*/*.py")} - {"__init__.py"}
    assert set(named) == modules and len(named) == len(modules)
