"""Compilation of generated functions by Triton's compilers, for devices that needn't be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def test_every_operation_compiles_for_nvidia_and_amd() -> None:
    here = Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(here / "compiling.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    for target in ("sm_90", "sm_100", "gfx942"):
        assert len([line for line in lines if line.startswith(f"{target} ")]) == 7, done.stdout
