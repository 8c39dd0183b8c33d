"""Each plugin's own tests pass, and it imports public names only."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from anyflex.plugin import DTYPES, OPERATIONS
from tests.plugins.installed import EXAMPLE, PLUGINS, run_tests
from tests.soak import SOAK, only_in_soak
from tests.testing.faults.fault import example

COMPILES = pytest.mark.skipif(
    not shutil.which("g++"), reason="torch compiles its CPU kernels with g++"
)
HAS_TRANSFORMERS = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers isn't installed; its newest needs Python 3.11",
)
WITHOUT_KIT = ("-k", "not TestConformance")
# g++ compiles a kernel for each of the calls that are compared with a formula.
WITHOUT_KERNELS = ("-k", "not TestConformance" + " and not formula" * (not SOAK))
PUBLIC = {"anyflex", "anyflex.plugin", "anyflex.testing"}
FILES = sorted([*PLUGINS.glob("*/src/**/*.py"), *PLUGINS.glob("*/tests/*.py")])


@pytest.mark.parametrize(
    ("plugin", "arguments", "may_skip"),
    [
        pytest.param("example", WITHOUT_KIT, False, id="example"),
        pytest.param("flash4", (), True, id="flash4"),
        pytest.param("torch-flex", WITHOUT_KERNELS, False, id="torch-flex", marks=COMPILES),
        pytest.param("transformers", (), True, id="transformers", marks=HAS_TRANSFORMERS),
        pytest.param("vllm", (), True, id="vllm"),  # what needs vLLM is skipped without it
    ],
)
def test_its_own_tests_pass(
    plugin: str, arguments: tuple[str, ...], may_skip: bool, tmp_path: Path
) -> None:
    printed = run_tests(PLUGINS / plugin, tmp_path, *arguments)
    assert " passed" in printed and (may_skip or "skipped" not in printed)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PLUGINS)))
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
        parts = ".".join([*modules, *names]).split(".")
        assert not [part for part in parts if part.startswith("_") and part != "__future__"]


def test_the_example_declares_every_operation_and_type(tmp_path: Path) -> None:
    with example(tmp_path) as backend:
        assert backend.capabilities.operations == frozenset(OPERATIONS)
        assert backend.capabilities.node_dtypes == frozenset(DTYPES.values())


@only_in_soak("tests/testing/test_numerical_faults.py runs some of its cases on the same plugin")
def test_the_quick_subset_of_the_kit_passes_on_the_example(tmp_path: Path) -> None:
    printed = run_tests(EXAMPLE, tmp_path, "-k", "TestConformance", "-o", "addopts=")
    passed = re.search(r"(\d+) passed", printed)
    assert passed is not None and int(passed[1]) > 300


@COMPILES
@only_in_soak("torch's compiler takes seconds a case; the plugin's other tests use it")
def test_the_kit_s_cases_that_torch_s_own_code_fails_pass_or_are_expected_to_fail(
    tmp_path: Path,
) -> None:
    printed = run_tests(PLUGINS / "torch-flex", tmp_path, "-k", "TestConformanceOnCpu")
    # Where auxiliary outputs are refused, the rest of the call is compared all the same.
    assert "1 xfailed" in printed and "skipped" in printed
