"""The kit's runner takes variants whose arithmetic the self test refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from soak import SOAK

SCRIPT = Path(__file__).with_name("emulated_kits.py")

pytestmark = pytest.mark.skipif(
    not SOAK, reason="only in make soak: `make test-metal` runs the script with every variant"
)


def test_variants_pass_a_case_and_are_named() -> None:
    variants = ("contracted", "sums-reversed")
    chosen = [word for variant in variants for word in ("--variant", variant)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *chosen, "--case", "decode/one_key"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"== {variant}: status 0" in done.stdout for variant in variants)
    assert done.stdout.count(" 1 passed") == len(variants)
