"""FlashAttention-4 as a plugin: its tests that need no GPU pass, and it imports public names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.plugins.installed import FLASH4, run_tests

PUBLIC = {"anyflex", "anyflex.plugin", "anyflex.testing"}
FILES = sorted([*FLASH4.glob("src/**/*.py"), *FLASH4.glob("tests/*.py")])


def test_its_own_tests_pass(tmp_path: Path) -> None:
    assert " passed" in run_tests(FLASH4, tmp_path)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_imports_public_names_only(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None
            modules = [node.module]
        for module in modules:
            assert module in PUBLIC or not module.startswith("anyflex."), module
