"""The kernels go through Triton's compilers with the table's configurations, and fit GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

SHARED = {"hopper": 227, "blackwell": 227, "ampere": 99, "amd": 64, "xpu": 128}
"""KiB that one program may have; an Ampere's are those of its smallest, sm_86."""


@pytest.mark.parametrize(
    ("target", "types", "dims"),
    [
        ("hopper", "bfloat16", "64,128"),
        ("blackwell", "bfloat16", "128"),
        ("ampere", "bfloat16", "64"),
        ("amd", "bfloat16", "128"),
        ("xpu", "bfloat16", "128"),
    ],
)
def test_kernels_compile_and_fit(target: str, types: str, dims: str) -> None:
    here = Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [
            sys.executable, str(here / "compiling_kernels.py"),
            "--targets", target, "--types", types, "--dims", dims,
        ],
        env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    kernels = 10 if target == "hopper" else 6
    assert len(lines) == kernels * len(dims.split(",")), done.stdout
    for line in lines:
        shared = next(int(word[7:]) for word in line.split() if word.startswith("shared="))
        assert shared <= SHARED[target] * 1024, line
        if target == "xpu":
            # Intel's compiler makes 2D block loads where it finds who made the descriptor.
            functions, loads, own = (
                int(line.split(f"{name}=")[1].split()[0])
                for name in ("functions", "descriptor_loads", "own")
            )
            assert functions == 1 and loads == own, line
            assert (loads > 0) == (line.split()[4] not in ("row_kernel", "combine_kernel")), line
        if target == "hopper":
            # ptxas makes each product wait for the one before (C7515) when it can't follow where
            # their registers are; some ways to nest the loops over runs bring that about.
            products, waits = (
                next(int(word.split("=")[1]) for word in line.split() if word.startswith(name))
                for name in ("products=", "waits=")
            )
            assert waits <= products / 2, line
