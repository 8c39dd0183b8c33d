"""A machine that loads artifacts saved on another one compiles no mod again, forward or
backward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from soak import SOAK

pytest.importorskip("llvmlite", reason="llvmlite is not installed")

PROGRAM = """
import json, pathlib, sys
import torch
import anyflex
from anyflex_cpu import jit

action, folder = sys.argv[1], pathlib.Path(sys.argv[2])
compile_mods = jit._compiled
compiled = []

def counted(*given):
    compiled.append(1)
    return compile_mods(*given)

jit._compiled = counted
if action == "own":
    assert anyflex.load_artifacts(folder / "own.zip").skipped == 0
elif action == "torch":
    torch.compiler.load_cache_artifacts((folder / "torch.bin").read_bytes())
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 70, 32, requires_grad=True) for _ in range(3))
bias = torch.randn(70, requires_grad=True)
mask = anyflex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 70, 70)
out = anyflex.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[j], mask, backend="cpu")
out.sum().backward()
anyflex.save_artifacts(folder / "own.zip")
if action != "own":
    (folder / "torch.bin").write_bytes(torch.compiler.save_cache_artifacts()[0])
print(json.dumps([len(compiled), float(out.sum()), float(bias.grad.sum())]))
"""


def in_a_process(action: str, folder: Path, cache: Path) -> list[Any]:
    """(how often mods were compiled, out's sum, the bias's gradient's)."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, action, folder],
        env={**os.environ, "ANYFLEX_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def test_mods_that_were_saved_are_not_compiled_again(tmp_path: Path) -> None:
    compiled, *values = in_a_process("compile", tmp_path, tmp_path / "cache")
    assert compiled == 1
    own = (tmp_path / "own.zip").read_bytes()
    # A process that compiles nothing saves the same artifacts for the next one.
    for number, action in enumerate(("torch", "own", *["torch"] * SOAK)):
        assert in_a_process(action, tmp_path, tmp_path / f"cache {number}") == [0, *values]
        assert (tmp_path / "own.zip").read_bytes() == own
