"""The portable Triton backend: its own tests pass, and it imports public names of anyflex only."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.backends.packages import FOLDER, imported_modules, run_tests
from tests.soak import SOAK

PUBLIC = {"anyflex", "anyflex.plugin", "anyflex.testing"}
LISTED = {
    "test_listed_mods.py": ("anyflex.tracing.trace", "anyflex.testing.mods."),
    "test_pair_reads.py": ("anyflex.tracing.trace",),
    "test_soft_caps.py": ("anyflex.tracing.trace", "anyflex.mods."),
}
"""Imports beyond the public names: the kit's list of mods and their graphs, which a backend gets
in a spec only."""
FILES = sorted([*FOLDER.glob("triton/src/**/*.py"), *FOLDER.glob("triton/tests/*.py")])


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton on this machine")
def test_its_own_tests_pass(tmp_path: Path) -> None:
    """All but those of test_triton_compiles.py."""
    compiled = "--ignore-glob=*/test_compiled_*.py"
    passed = re.search(r"(\d+) passed", run_tests("triton", tmp_path, compiled))
    # If the backend refused its machine, the kit would be skipped.
    assert passed is not None and int(passed[1]) > (1500 if SOAK else 400)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_imports_public_names_only(file: Path) -> None:
    for module in imported_modules(file):
        public = module in PUBLIC or module.startswith(LISTED.get(file.name, ()))
        assert public or not module.startswith("anyflex."), module
        package = module.partition(".")[0]
        assert package == "anyflex_triton" or not package.startswith("anyflex_"), module


@pytest.mark.parametrize("package", ["triton", "xpu", "cuda"])
def test_importing_a_backend_loads_no_triton(package: str) -> None:
    pytest.importorskip(f"anyflex_{package}")
    program = (
        f"import sys, torch, anyflex_{package}.backend\n"
        "print(sorted(n for n in sys.modules if n.partition('.')[0] == 'triton'))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert printed == "[]\n"
