"""Shortcuts of `interpreting` change no result, and very large launches are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl  # noqa: E402
from interpreting import MOST_PROGRAMS  # noqa: E402


@triton.jit
def doubled(x):
    return x + x


@triton.jit
def kernel(out, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(out + index, doubled(tl.exp2(index.to(tl.float32) / 7)))


def test_a_launch_leaves_the_language_as_it_was() -> None:
    before = tl.load, tl.core.load, tl.exp2, tl.reduce
    out = torch.empty(16)
    kernel[(3,)](out, 16)
    assert (tl.load, tl.core.load, tl.exp2, tl.reduce) == before
    assert torch.allclose(out, 2 * 2 ** (torch.arange(16) / 7))


def test_a_launch_of_very_many_programs_is_refused() -> None:
    with pytest.raises(RuntimeError, match=f"{MOST_PROGRAMS + 1} programs"):
        kernel[(MOST_PROGRAMS + 1,)](torch.empty(16), 16)


COMPUTED = """
import hashlib, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
from interpreting import hasten
import torch, anyflex
from anyflex.plugin import isolated, register
from anyflex.testing import posing
from anyflex_triton.backend import TritonBackend

torch.manual_seed(0)
tensors = [torch.randn(1, 1, rows, 16, requires_grad=True) for rows in (40, 50, 50)]
mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 40, 50, BLOCK_SIZE=16)
with isolated(), posing("cuda"):
    register("cuda.mine", TritonBackend)
    soft = lambda s, b, h, q, k: 20 * torch.tanh(s / 20) - (q - k).abs()
    for prepare in (lambda: None, hasten):
        prepare()
        out = anyflex.flex_attention(*tensors, soft, mask, backend="cuda.mine")
        found = [out, *torch.autograd.grad(out, tensors, torch.ones_like(out))]
        print(hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in found)).hexdigest())
"""


def test_results_are_those_of_the_interpreter_as_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPUTED, Path(__file__).parent],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    as_it_is, hastened = done.stdout.split()
    assert as_it_is == hastened
