"""Kernels that travel compiled in the wheel: made without a GPU, found without a compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from scripts.ready_kernels import VARIABLES

ROOT = Path(__file__).parents[2]

RUN = """
import sys
from pathlib import Path
import torch, triton
from anyflex_cuda import backend
from anyflex_triton import write_ready_kernels
from scripts.ready_kernels import Sample, compiled_for

compiled = []
def note(*, src, cache_hit, **more):
    if not cache_hit:
        compiled.append(src.name)
triton.knobs.compilation.listener = note
action, archive = sys.argv[1], Path(sys.argv[2])
if action == "use":
    backend.READY = archive
kernels = compiled_for(Sample("full", torch.bfloat16, 64), [(256, False)])
# Line numbers would name folders of the machine that compiled them.
assert not any(b"hopper_forward.py" in kernel for kernel in kernels.values())
if action == "make":
    fingerprint = backend.CudaBackend("cuda", "cuda").fingerprint()
    write_ready_kernels(archive, fingerprint, kernels)
print(sorted(kernels), compiled)
"""


def fresh_process(action: str, archive: Path, **more: str) -> list[str]:
    """Run RUN with empty caches; return the names of the kernels, and of those compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folder = archive.parent / action
    done = subprocess.run(
        [sys.executable, "-c", RUN, action, archive],
        env={
            **environment,
            "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)]),
            "ANYFLEX_CACHE_DIR": str(folder / "anyflex"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            **more,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1].split("] ")


def test_a_call_finds_the_kernels_that_came_compiled(tmp_path: Path) -> None:
    archive = tmp_path / "ready.zip"
    names, compiled = fresh_process("make", archive, **VARIABLES)
    assert compiled == "['forward_kernel']"
    assert fresh_process("use", archive) == [names, "[]"]
