"""The kernels go through Triton's compilers with the table's configurations, and fit GPUs.

A part of what `bench/triton_compiles.py` compiles, judged by it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

HERE = Path(__file__).parent
TOOLS = HERE.parents[2] / "bench"


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script whose Triton compiles: this process has the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "dims", "patterns", "kernels"),
    [
        ("hopper", "64,128", "causal", "forward,decode,keys,queries"),
        ("hopper", "64,128", "plain", "forward,keys,queries"),
        ("blackwell", "64", "plain", "forward,keys"),
        ("blackwell", "128", "causal", "forward,decode,keys,queries"),
        ("ampere", "64", "causal", "forward,decode,keys,queries"),
        ("amd", "128", "causal", "forward,decode,keys,queries"),
        ("xpu", "128", "causal", "forward,decode,keys,queries"),
    ],
)
def test_kernels_compile_and_fit(target: str, dims: str, patterns: str, kernels: str) -> None:
    done = run(
        TOOLS / "triton_compiles.py", "--targets", target, "--types", "bfloat16",
        "--dims", dims, "--patterns", patterns, "--kernels", kernels,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    count = len(dims.split(",")) * len(kernels.split(","))
    assert f"{count} kernels by triton" in done.stdout, done.stdout


def test_lengths_batches_and_strides_compile_once_a_class() -> None:
    """Decoding has a kernel for up to 16 rows and one for up to 32, forward one for keys that end
    where its tiles do and one for others."""
    done = run(HERE / "counting_compiles.py")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert sorted(done.stdout.split()) == [
        "combine_kernel", "decode_kernel", "decode_kernel", "forward_kernel", "forward_kernel",
    ]  # fmt: skip
