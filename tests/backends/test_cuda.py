"""The CUDA backend: its tests pass, and it imports public names and the Triton package only."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.backends.packages import FOLDER, imported_modules, run_tests
from tests.soak import SOAK

PUBLIC = {"anyflex", "anyflex.plugin", "anyflex.testing"}
BEYOND = {
    "test_hopper_calls.py": ("anyflex.runtime.scalar_specialization",),
    "test_kernel_calls.py": ("anyflex.bench.",),
}
"""Imports beyond the public names: what makes each case's numbers constants, and the rows of
`anyflex bench`, whose kernels must be among those that are checked."""
FILES = sorted([*FOLDER.glob("cuda/src/**/*.py"), *FOLDER.glob("cuda/tests/*.py")])


COMPILED = ("decode", "blackwell")
"""Kernels that `make test-newest-triton` compiles in CI, and `make soak` with the pinned Triton
too."""


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton on this machine")
def test_its_own_tests_pass(tmp_path: Path) -> None:
    left_out = [] if SOAK else [f"--ignore=tests/test_compiled_{name}.py" for name in COMPILED]
    assert " passed" in run_tests("cuda", tmp_path, *left_out)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_imports_public_names_only(file: Path) -> None:
    for module in imported_modules(file):
        public = module in PUBLIC or module.startswith(BEYOND.get(file.name, ()))
        assert public or not module.startswith("anyflex."), module
        package = module.partition(".")[0]
        assert package in ("anyflex_cuda", "anyflex_triton") or "anyflex_" not in package, module
