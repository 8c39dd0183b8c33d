"""Calls of many lengths, batches and strides, as on an H200; prints each kernel that is compiled.

Run as a script, without TRITON_INTERPRET, by `test_compiled_kernels`. Plain calls are compiled by
Triton and counted by its listener. With `training`, causal calls under a soft cap run with their
backward, and the requests to Triton's compiler are counted. Nothing is launched.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

import anyflex
from anyflex.plugin import Accepted, Decision, isolated, register
from anyflex.testing import posing
from anyflex_triton import program
from anyflex_triton.backend import TritonBackend
from anyflex_triton.configs import Target


class Hopper(TritonBackend):
    def probe(self) -> Decision:
        return Accepted()

    def target(self) -> Target:
        return "hopper"

    def kernel(self, given: Any) -> Any:
        # Kernels among the spec's artifacts would not be asked for.
        return super().kernel(given._replace(files=None))


compile_for = triton.compile


def compile_offline(source: Any, target: Any, options: dict[str, Any]) -> Any:
    return compile_for(source, target=GPUTarget("cuda", 90, 32), options=options)


def note(*, src: Any, cache_hit: bool, **more: Any) -> None:
    if not cache_hit:
        print(src.name, flush=True)


asked: set[tuple[str, str]] = set()


def ask_for(source: Any, target: Any, options: dict[str, Any]) -> Any:
    # Triton takes kernels that were compiled before out of its cache.
    wanted = (source.hash(), repr(sorted(options.items())))
    if wanted not in asked:
        asked.add(wanted)
        print(source.name, flush=True)
    return SimpleNamespace(run=None)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def call(rows: torch.Tensor, *, training: bool) -> None:
    if not training:
        anyflex.flex_attention(rows, rows, rows, backend="cuda.offline")
        return
    rows = rows.detach().requires_grad_()
    length = rows.shape[2]
    mask = anyflex.create_block_mask(causal, None, None, length, length)
    out = anyflex.flex_attention(
        rows, rows, rows, anyflex.mods.softcap(20.0), mask, backend="cuda.offline"
    )
    out.backward(torch.zeros_like(out))


def main(*, training: bool) -> None:
    triton.compile = ask_for if training else compile_offline
    # There is no GPU to launch on.
    program.launch_kernel = lambda kernel, grid, arguments: None
    triton.knobs.compilation.listener = note
    with tempfile.TemporaryDirectory() as folder, isolated(), posing("cuda"):
        triton.knobs.cache.dir = folder
        register("cuda.offline", Hopper)
        for batch, length in itertools.product((1, 2, 5), (1, 15, 16, 17, 128, 1000, 4096)):
            # Rows lie further apart for each batch size.
            rows = torch.zeros(batch, 2, length, 64 + 8 * batch, dtype=torch.bfloat16)[..., :64]
            call(rows, training=training)


if __name__ == "__main__":
    main(training="training" in sys.argv)
