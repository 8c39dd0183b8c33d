"""The backend for Apple GPUs: its own tests pass, and it imports public names only."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from tests.backends.packages import FOLDER, imported_modules, run_tests

PUBLIC = {"anyflex", "anyflex.plugin", "anyflex.testing"}
LISTED = {
    "test_mods.py": ("anyflex.tracing.trace", "anyflex.testing.mods."),
    "test_random_mods.py": ("anyflex.tracing.trace",),
}
"""Imports beyond the public names: the kit's list of mods and their graphs, which a backend gets
in a spec only."""
FILES = sorted([*FOLDER.glob("mps/src/**/*.py"), *FOLDER.glob("mps/tests/*.py")])
EMULATOR = sorted(FOLDER.glob("mps/tests/emulator/**/*.py"))


def test_its_own_tests_pass_and_those_of_an_apple_gpu_are_skipped_and_counted(
    tmp_path: Path,
) -> None:
    # The kit is a test of its own, `test_mps_conformance`: other workers run it meanwhile.
    real = torch.backends.mps.is_available()
    left_out = ("--ignore=tests/test_conformance.py", *(("-m", "not mps") if real else ()))
    printed = run_tests("mps", tmp_path, *left_out)
    absent = re.search(r"the Metal emulator (needs|runs on) .*", printed)
    if absent is not None and not os.environ.get("CI"):
        pytest.skip(absent[0])
    found = re.search(r"^(\d+) passed(?:, (\d+) skipped)?", printed, flags=re.MULTILINE)
    assert found is not None and int(found[1]) > 0, printed
    if not real:
        assert found[2] is not None, printed
        assert "no Apple GPU: torch.backends.mps.is_available() is False" in printed


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_imports_public_names_only(file: Path) -> None:
    for module in imported_modules(file):
        public = module in PUBLIC or module.startswith(LISTED.get(file.name, ()))
        assert public or not module.startswith("anyflex."), module
        package = module.partition(".")[0]
        assert package == "anyflex_mps" or "anyflex_" not in package, module


@pytest.mark.parametrize("file", EMULATOR, ids=lambda file: file.name)
def test_the_emulator_imports_nothing_of_what_it_judges(file: Path) -> None:
    assert not re.search(r"^\s*(from|import) anyflex", file.read_text(), flags=re.MULTILINE)
