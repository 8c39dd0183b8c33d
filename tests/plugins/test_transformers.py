"""anyflex in transformers: the plugin's own tests pass, and it imports public names only."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from tests.plugins.installed import ROOT, run_tests

PLUGIN = ROOT / "plugins" / "transformers"
FILES = sorted([*PLUGIN.glob("src/**/*.py"), *PLUGIN.glob("tests/*.py")])
PUBLIC = {"anyflex", "anyflex.plugin", "anyflex.testing"}


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers isn't installed; its newest needs Python 3.11",
)
def test_its_own_tests_pass(tmp_path: Path) -> None:
    assert " passed" in run_tests(PLUGIN, tmp_path)


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
            assert not any(
                part.startswith("_") for part in module.split(".") if part != "__future__"
            )
