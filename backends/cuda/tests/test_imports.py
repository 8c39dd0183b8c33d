"""Imports of the kernel class: they are few, because Triton reads the source of each kernel's
functions."""

from __future__ import annotations

import subprocess
import sys

__all__: list[str] = []

RARE = {
    "anyflex_cuda.blackwell_forward",
    "anyflex_cuda.decode_sums",
    "anyflex_cuda.hopper_decode",
    "anyflex_cuda.hopper_wide_backward",
}
"""Modules of kernels that most processes don't launch."""


def test_rare_kernels_are_imported_where_they_are_launched() -> None:
    code = "import sys, anyflex_cuda.kernel; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    there = set(done.stdout.split())
    assert "anyflex_cuda.hopper_forward" in there
    assert not RARE & there
