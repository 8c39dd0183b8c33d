"""Compilations of the portable Triton backend's tests for GPUs that aren't there.

They have a file of their own, which another worker runs.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.backends.packages import FOLDER, run_tests
from tests.soak import SOAK

NAMES = "compiled_*" if SOAK else "compiled_kernels"
FILES = sorted(FOLDER.glob(f"triton/tests/test_{NAMES}.py"))


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton on this machine")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_and_mods_compile(file: Path, tmp_path: Path) -> None:
    assert " passed" in run_tests("triton", tmp_path, str(file))
