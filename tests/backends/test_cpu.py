"""The CPU backend: its own tests pass, and it imports public names of anyflex only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.packages import FOLDER, imported_modules, run_tests

ROOT = FOLDER.parent
CPU = FOLDER / "cpu"
PUBLIC = {"anyflex", "anyflex.plugin", "anyflex.testing"}
TRACES = {
    name: {"anyflex.tracing.trace"} for name in ("test_bytecode.py", "test_owned_captured.py")
}
"""Imports beyond the public names: graphs of mods, which a backend gets in a spec only."""
FILES = sorted([*CPU.glob("src/**/*.py"), *CPU.glob("tests/*.py")])


def test_its_own_tests_pass(tmp_path: Path) -> None:
    printed = run_tests("cpu", tmp_path, "-k", "not conformance")
    assert " passed" in printed


def test_compiled_mods_compute_what_random_expressions_say(tmp_path: Path) -> None:
    # The expressions are those of the tests here, which the backend's own don't import.
    path = CPU.relative_to(ROOT) / "tests" / "test_jit_random.py"
    printed = run_tests("cpu", tmp_path, "-o", "addopts=", str(path), cwd=ROOT)
    passed = re.search(r"(\d+) passed", printed)
    assert passed is not None and int(passed[1]) >= 25 and "skipped" not in printed


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_imports_public_names_only(file: Path) -> None:
    for module in imported_modules(file):
        public = module in PUBLIC | TRACES.get(file.name, set())
        assert public or not module.startswith("anyflex."), module
        package = module.partition(".")[0]
        assert package == "anyflex_cpu" or not package.startswith("anyflex_"), module


def test_importing_the_backend_loads_no_compiler_and_no_library(tmp_path: Path) -> None:
    program = (
        "import sys, torch, anyflex_cpu.backend as b\n"
        "print(sorted(n for n in sys.modules if 'llvmlite' in n or n == 'anyflex_cpu.jit'))\n"
        "from anyflex_cpu import library; print(library._loaded)\n"
        "import anyflex_cpu.jit; print('llvmlite' in sys.modules)"
    )
    pytest.importorskip("anyflex_cpu")
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines() == ["[]", "None", "False"]
