"""Compiles the kernels of training calls on Hopper: those in Gluon with those in plain Triton
beside them, and the portable ones; no device is needed.

Run as a script by `test_compiled_once`, with a folder: ``save`` writes anyflex's archive and
torch's bundle there, ``own`` and ``torch`` load them first. Prints the number of kernels, and how
many of them Triton compiled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from compiling import HOPPER

import anyflex
from anyflex.testing import posing
from anyflex_cuda import forward_call
from anyflex_triton.building import Program

LENGTH = 256
compiled: list[str] = []


def note(*, src: Any, cache_hit: bool, **more: Any) -> None:
    if not cache_hit:
        compiled.append(src.name)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def softcap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 30.0 * torch.tanh(score / 30.0)


def install(folder: Path) -> None:
    """Register the backend as an installed one, which keeps its artifacts on disk."""
    metadata = folder / "recorded-1.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: recorded\nVersion: 1\n")
    points = "[anyflex.backends.v1]\ncuda.recorded = compiling_backward:OnHopper\n"
    (metadata / "entry_points.txt").write_text(points)
    sys.path.append(str(folder))


@contextmanager
def on_hopper() -> Iterator[list[Program]]:
    """Let CPU tensors count as a Hopper GPU's. Yield the launched programs, which aren't run."""
    launched: list[Program] = []
    with (
        posing("cuda"),
        mock.patch.object(Program, "launch", lambda program, *_: launched.append(program)),
        mock.patch.object(Program, "is_compiled", lambda program, device: True),
        mock.patch.object(forward_call, "cores", lambda device: 132),
    ):
        yield launched


def train(*, hopper: bool) -> None:
    q = torch.zeros(1, 2, LENGTH, 64).to(torch.bfloat16).requires_grad_()
    mask = anyflex.create_block_mask(causal, None, None, LENGTH, LENGTH)
    out = anyflex.flex_attention(
        q, q, q, score_mod=softcap, block_mask=mask,
        kernel_options={"cuda.recorded": {"hopper": hopper}}, backend="cuda.recorded",
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    out.backward(torch.zeros_like(out))


def main(action: str, folder: Path) -> None:
    triton.knobs.compilation.listener = note
    install(folder)
    with on_hopper() as launched:
        if action == "own":
            loaded = anyflex.load_artifacts(folder / "own.zip")
            assert loaded.artifacts and not loaded.skipped, loaded
        elif action == "torch":
            torch.compiler.load_cache_artifacts((folder / "torch.bin").read_bytes())
        train(hopper=True)
        train(hopper=False)
    for program in launched:
        kernel = program._translate(HOPPER, program.options)
        assert kernel.kernel.startswith(b"\x7fELF")
    if action == "save":
        anyflex.save_artifacts(folder / "own.zip")
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        (folder / "torch.bin").write_bytes(saved[0])
    names = sorted(program.function.__name__ for program in launched)
    print(json.dumps({"launched": names, "compiled": compiled}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
