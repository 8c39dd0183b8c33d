"""The conformance kit on the kernels for Apple GPUs, in their emulator."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.backends.packages import run_tests


def test_the_quick_kit_passes_in_the_emulator(tmp_path: Path) -> None:
    printed = run_tests("mps", tmp_path, "tests/test_conformance.py")
    absent = re.search(r"the Metal emulator (needs|runs on) .*", printed)
    if absent is not None and not os.environ.get("CI"):
        pytest.skip(absent[0])
    passed = re.search(r"^(\d+) passed", printed, flags=re.MULTILINE)
    assert passed is not None and int(passed[1]) > 500, printed
