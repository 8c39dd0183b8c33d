"""Decoding calls through the backend, without a GPU: see decode_in_python.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def test_calls_give_the_reference_s_outputs_where_nothing_is_finite_too() -> None:
    here = Path(__file__).parent
    paths = [*(path for path in sys.path if path), str(here)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, str(here / "decode_in_python.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count(": right") == 12, done.stdout
