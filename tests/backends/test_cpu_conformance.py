"""The conformance kit on the CPU backend."""

from __future__ import annotations

import re
from pathlib import Path

from tests.backends.packages import run_tests
from tests.soak import SOAK


def test_the_kit_passes_with_compiled_and_with_interpreted_mods(tmp_path: Path) -> None:
    """`make test` draws a third of the quick subset: see the backend's `conftest.py`."""
    printed = run_tests(
        "cpu", tmp_path, "-k", "TestConformance or TestInterpreted", "-o", "addopts="
    )
    passed = re.search(r"(\d+) passed", printed)
    assert passed is not None and int(passed[1]) > (500 if SOAK else 200)
