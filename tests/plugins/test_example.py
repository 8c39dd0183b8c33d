"""The example plugin: its own tests pass, and it uses public names only."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from anyflex.plugin import DTYPES, OPERATIONS
from tests.plugins.installed import EXAMPLE, run_tests
from tests.soak import only_in_soak
from tests.testing.faults.fault import example

PUBLIC = {"anyflex", "anyflex.plugin", "anyflex.testing"}
FILES = sorted([*EXAMPLE.glob("src/**/*.py"), *EXAMPLE.glob("tests/*.py")])


def test_it_declares_every_operation_and_type(tmp_path: Path) -> None:
    with example(tmp_path) as backend:
        assert backend.capabilities.operations == frozenset(OPERATIONS)
        assert backend.capabilities.node_dtypes == frozenset(DTYPES.values())


def test_its_own_tests_pass(tmp_path: Path) -> None:
    printed = run_tests(EXAMPLE, tmp_path, "-k", "not TestConformance")
    assert " passed" in printed and "skipped" not in printed


@only_in_soak("tests/testing/test_numerical_faults.py runs these cases on the same plugin")
def test_the_quick_subset_of_the_kit_passes(tmp_path: Path) -> None:
    printed = run_tests(EXAMPLE, tmp_path, "-k", "TestConformance", "-o", "addopts=")
    passed = re.search(r"(\d+) passed", printed)
    assert passed is not None and int(passed[1]) > 300


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
        names = [alias.name for alias in node.names] if modules else []
        assert not [name for name in names if name.startswith("_")]
