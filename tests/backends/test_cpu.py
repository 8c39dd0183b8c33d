"""The CPU backend: its own tests pass, and it imports public names of anyflex only."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CPU = ROOT / "backends" / "cpu"
PUBLIC = {"anyflex", "anyflex.plugin", "anyflex.testing"}
TRACES = {"test_bytecode.py": {"anyflex.tracing.trace"}}
"""Imports beyond the public names: graphs of mods, which a backend gets in a spec only."""
FILES = sorted([*CPU.glob("src/**/*.py"), *CPU.glob("tests/*.py")])


def run_tests(folder: Path, *arguments: str, cwd: Path = CPU) -> str:
    """Run the backend's tests as `make test` has installed it; return what pytest prints."""
    if not any(point.name == "cpu" for point in entry_points(group="anyflex.backends.v1")):
        pytest.skip("anyflex-cpu is not installed: make test, or pip install -e backends/cpu")
    environment = {n: v for n, v in os.environ.items() if not n.startswith("ANYFLEX_")}
    environment |= {"ANYFLEX_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_own_tests_pass(tmp_path: Path) -> None:
    printed = run_tests(tmp_path, "-k", "not conformance")
    assert " passed" in printed


def test_the_quick_subset_of_the_kit_passes(tmp_path: Path) -> None:
    printed = run_tests(tmp_path, "-k", "TestConformance or TestInterpreted", "-o", "addopts=")
    passed = re.search(r"(\d+) passed", printed)
    assert passed is not None and int(passed[1]) > 500


def test_compiled_mods_compute_what_random_expressions_say(tmp_path: Path) -> None:
    # The expressions are those of the tests here, which the backend's own don't import.
    path = CPU.relative_to(ROOT) / "tests" / "test_jit_random.py"
    printed = run_tests(tmp_path, "-o", "addopts=", str(path), cwd=ROOT)
    assert re.search(r"\b100 passed", printed) and "skipped" not in printed


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
            public = PUBLIC | TRACES.get(file.name, set())
            assert module in public or not module.startswith("anyflex."), module
            package = module.partition(".")[0]
            assert package == "anyflex_cpu" or not package.startswith("anyflex_"), module
        names = [alias.name for alias in node.names] if modules else []
        assert not [name for name in names if name.startswith("_")]


def test_importing_the_backend_loads_no_compiler_and_no_library(tmp_path: Path) -> None:
    program = (
        "import sys, torch, anyflex_cpu.backend as b\n"
        "print(sorted(n for n in sys.modules if 'llvmlite' in n or n == 'anyflex_cpu.jit'))\n"
        "from anyflex_cpu import library; print(library._loaded)"
    )
    pytest.importorskip("anyflex_cpu")
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines() == ["[]", "None"]
