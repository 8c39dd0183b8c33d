"""The kit stands on public names, as everything that strangers copy from it does."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import anyflex.testing

FOLDER = Path(anyflex.testing.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_the_kit_imports_no_private_name(file: Path) -> None:
    imported: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported += [f"{node.module}.{alias.name}" for alias in node.names]
    names = [name for name in imported if not name.startswith("__future__.")]
    assert not [name for name in names if any(part[:1] == "_" for part in name.split("."))]
