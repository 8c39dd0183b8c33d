"""The XPU backend: its own tests pass, and it imports public names and the Triton package only."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.backends.packages import FOLDER, imported_modules, run_tests

PUBLIC = {"anyflex", "anyflex.plugin", "anyflex.testing"}
FILES = sorted([*FOLDER.glob("xpu/src/**/*.py"), *FOLDER.glob("xpu/tests/*.py")])


def test_its_own_tests_pass_and_those_of_an_intel_gpu_are_skipped_and_counted(
    tmp_path: Path,
) -> None:
    if torch.xpu.is_available():
        assert " passed" in run_tests("xpu", tmp_path, "-m", "not xpu")
        return
    printed = run_tests("xpu", tmp_path)
    found = re.search(r"^(\d+) passed, (\d+) skipped", printed, flags=re.MULTILINE)
    assert found is not None and min(int(found[1]), int(found[2])) > 0, printed
    assert "no Intel GPU: torch.xpu.is_available() is False" in printed


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton on this machine")
def test_its_configurations_give_the_right_numbers_in_the_interpreter(tmp_path: Path) -> None:
    printed = run_tests("xpu", tmp_path, "tests/test_interpreter.py", TRITON_INTERPRET="1")
    assert " passed" in printed and " skipped" not in printed


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_imports_public_names_only(file: Path) -> None:
    for module in imported_modules(file):
        assert module in PUBLIC or not module.startswith("anyflex."), module
        package = module.partition(".")[0]
        assert package in ("anyflex_xpu", "anyflex_triton") or "anyflex_" not in package, module
