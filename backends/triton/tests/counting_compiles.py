"""Calls of many lengths, batches and strides, as on an H200; prints each kernel that is compiled.

Run as a script, without TRITON_INTERPRET, by `test_compiled_kernels`. Compiling is Triton's own,
counted by its listener; nothing is launched.
"""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

import anyflex
from anyflex.plugin import Accepted, Decision, isolated, register
from anyflex.testing import posing
from anyflex_triton import launch
from anyflex_triton.backend import TritonBackend
from anyflex_triton.configs import Target


class Hopper(TritonBackend):
    def probe(self) -> Decision:
        return Accepted()

    def target(self) -> Target:
        return "hopper"


compile_for = triton.compile


def compile_offline(source: Any, options: dict[str, Any]) -> Any:
    return compile_for(source, target=GPUTarget("cuda", 90, 32), options=options)


def note(*, src: Any, cache_hit: bool, **more: Any) -> None:
    if not cache_hit:
        print(src.name, flush=True)


def main() -> None:
    triton.compile = compile_offline
    # There is no GPU to launch on.
    launch._launch = lambda kernel, grid, arguments: None
    triton.knobs.compilation.listener = note
    with tempfile.TemporaryDirectory() as folder, isolated(), posing("cuda"):
        triton.knobs.cache.dir = folder
        register("cuda.offline", Hopper)
        for batch, length in itertools.product((1, 2, 5), (1, 15, 16, 17, 128, 1000, 4096)):
            # Rows lie further apart for each batch.
            rows = torch.zeros(batch, 2, length, 64 + 8 * batch, dtype=torch.bfloat16)[..., :64]
            anyflex.flex_attention(rows, rows, rows, backend="cuda.offline")


if __name__ == "__main__":
    main()
