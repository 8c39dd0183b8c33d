"""A machine that loads what another has saved compiles no kernel again, forward or backward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts_beside import SOAK

pytest.importorskip("triton", reason="triton is not installed")

HERE = Path(__file__).parent


def fresh_process(action: str, archives: Path, folders: Path) -> dict[str, Any]:
    """Run the script with empty caches. Return its output."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, HERE / "compiling_once.py", action, archives],
        env={
            **environment,
            "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(HERE)]),
            "ANYFLEX_CACHE_DIR": str(folders / action / "anyflex"),
            "TRITON_CACHE_DIR": str(folders / action / "triton"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(
    not SOAK,
    reason="only in make soak: it compiles a training call's kernels; test_ready_kernels.py loads "
    "a compiled kernel, and backends/cpu/tests/test_carried_code.py both kinds of archive",
)
def test_kernels_that_were_saved_are_not_compiled_again(tmp_path: Path) -> None:
    cold = fresh_process("save", tmp_path, tmp_path)
    # Forward and backward: Hopper's kernels in Gluon, and in plain Triton those that repair and
    # convert, or the portable ones.
    assert len(cold["launched"]) == 9
    assert len(cold["compiled"]) == len(cold["launched"])
    for action in ("own", "torch"):
        found = fresh_process(action, tmp_path, tmp_path)
        assert found == {"launched": cold["launched"], "compiled": []}
