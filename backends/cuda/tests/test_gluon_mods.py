"""Mods for kernels in Gluon: the portable text with four names bound anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from anyflex_cuda.gluon_mods import gluon_source


def test_every_operation_and_everyday_mods_compile_in_a_kernel_of_gluon() -> None:
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
    assert len([line for line in done.stdout.splitlines() if " bytes" in line]) == 15


def test_a_constant_a_spread_scalar_and_a_read_are_bound_anew() -> None:
    from compiling import specs

    from anyflex_triton.mods import write_source

    for spec in specs().values():
        text = gluon_source(write_source(spec))
        assert "from anyflex_cuda import mod_operations" in text
        for name in ("tl.full(", "ops.spread(", "ops.load_once(", "ops.tanh_capped("):
            assert name not in text
