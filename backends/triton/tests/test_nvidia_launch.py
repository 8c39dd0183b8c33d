"""Launches with prepared arguments equal Triton's own, byte for byte."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton to launch with")

import triton
from triton.backends.nvidia import driver as nvidia

HERE = Path(__file__).parent
COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")

pytestmark = [
    pytest.mark.skipif(
        not triton.__version__.startswith("3.6."), reason="Triton's launcher is another one"
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the driver is a real one here"),
    pytest.mark.skipif(COMPILER is None, reason="there is no C compiler"),
]


def test_with_a_driver_that_notes_launches(tmp_path: Path) -> None:
    """The cases run in a process of their own, because the driver's library has one name."""
    assert COMPILER is not None
    headers = [f"-I{folder}" for folder in nvidia.include_dirs]
    subprocess.run(
        [
            COMPILER, "-shared", "-fPIC", "-Wall", "-Werror", *headers,
            "-Wl,-soname,libcuda.so.1", "-o", tmp_path / "libcuda.so.1", HERE / "fake_driver.c",
        ],
        check=True,
    )  # fmt: skip
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
            HERE / "with_fake_driver.py",
        ],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}",
            "TRITON_LIBCUDA_PATH": str(tmp_path),
            "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        },
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
