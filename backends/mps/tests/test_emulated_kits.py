"""The kit's runner takes variants whose arithmetic the self test refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("emulated_kits.py")


@pytest.mark.parametrize("variant", ["contracted", "sums-reversed"])
def test_a_variant_passes_a_case_and_is_named(variant: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--variant", variant, "--case", "decode/one_key"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"== {variant}: status 0" in done.stdout and " 1 passed" in done.stdout
