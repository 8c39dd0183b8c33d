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


def test_its_own_tests_pass(tmp_path: Path) -> None:
    assert " passed" in run_tests("xpu", tmp_path, "-m", "not xpu")


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton on this machine")
def test_its_configurations_give_the_right_numbers_in_the_interpreter(tmp_path: Path) -> None:
    printed = run_tests("xpu", tmp_path, "tests/test_interpreter.py", TRITON_INTERPRET="1")
    assert " passed" in printed and " skipped" not in printed


@pytest.mark.skipif(torch.xpu.is_available(), reason="this machine has an Intel GPU")
def test_what_needs_an_intel_gpu_is_skipped_with_the_reason_and_counted(tmp_path: Path) -> None:
    printed = run_tests("xpu", tmp_path, "-m", "xpu")
    skipped = re.search(r"^(\d+) skipped, \d+ deselected", printed, flags=re.MULTILINE)
    assert skipped is not None and int(skipped[1]) > 0, printed
    assert "no Intel GPU: torch.xpu.is_available() is False" in printed


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_imports_public_names_only(file: Path) -> None:
    for module in imported_modules(file):
        assert module in PUBLIC or not module.startswith("anyflex."), module
        package = module.partition(".")[0]
        assert package in ("anyflex_xpu", "anyflex_triton") or "anyflex_" not in package, module
