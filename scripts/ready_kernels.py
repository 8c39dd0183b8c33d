"""Archive of Hopper's kernels of ready-made masks and mods, compiled without a GPU.

    python scripts/ready_kernels.py [FILE] [--only causal,full] [--jobs 2]

`make wheels` runs it before it builds the wheel. FILE is by default what the installed
`anyflex_cuda` asks, so that whoever has another Triton, or other sources, may make their own. It
compiles what calls with these mods run: in bfloat16 and float16, with head dims 64 and 128;
forward with and without gradients, of whole tiles and ragged ones, many and few; backward;
decoding.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

import anyflex
from anyflex import masks, mods
from anyflex.plugin import isolated, register
from anyflex_cuda.backend import READY, CudaBackend
from anyflex_triton import compiling_for, write_ready_kernels

__all__ = ["CALLS", "PATTERNS", "VARIABLES", "Sample", "compiled_for", "main", "samples"]

ARCH = "sm_90"
VARIABLES = {"PTXAS_OPTIONS": "-suppress-debug-info"}
"""Environment of the compiler. Line numbers are three quarters of a kernel, and name folders of
this machine. Where Triton leaves them out itself, LLVM allocates some registers otherwise."""
CALLS = (*product((4352, 4350, 256), (False, True)), (1, False))
"""Query rows of the calls, and whether gradients are wanted: more tiles than multiprocessors, of
whole and of ragged rows; few tiles; decoding."""
_HEADS = 4
_SAMPLE_DOCUMENT = 100
"""Tokens of a document."""


def _documents(keys: int) -> torch.Tensor:
    return (torch.arange(keys) // _SAMPLE_DOCUMENT).to(torch.int32)


PATTERNS: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "full": lambda keys: (None, None),
    "causal": lambda keys: (None, masks.causal()),
    "window": lambda keys: (None, masks.causal_window(1024)),
    "documents": lambda keys: (
        None,
        anyflex.and_masks(masks.causal(), masks.document(_documents(keys))),
    ),
    "softcap": lambda keys: (mods.softcap(50.0), masks.causal()),
    "alibi": lambda keys: (mods.alibi(_HEADS), masks.causal()),
}
"""Name -> function of the number of keys that returns (score mod, mask mod)."""


class Sample(NamedTuple):
    """Calls that are compiled together."""

    pattern: str
    dtype: torch.dtype
    dim: int


def samples(patterns: Sequence[str]) -> list[Sample]:
    """Return the samples with these patterns."""
    dtypes = (torch.bfloat16, torch.float16)
    return [Sample(*each) for each in product(patterns, dtypes, (64, 128))]


def compiled_for(sample: Sample, calls: Sequence[tuple[int, bool]] = CALLS) -> dict[str, bytes]:
    """Compile what calls as in `CALLS` run; return name -> content of each kernel."""
    with isolated(), compiling_for(ARCH) as gpu:
        register("cuda", CudaBackend)
        for length, learns in calls:
            _call(sample, length, learns)
        return gpu.kernels


def _call(sample: Sample, length: int, learns: bool) -> None:
    keys = max(length, 256)
    query, key, value = (
        torch.zeros(1, _HEADS, rows, sample.dim, dtype=sample.dtype, requires_grad=learns)
        for rows in (length, keys, keys)
    )
    score, mask = PATTERNS[sample.pattern](keys)
    block_mask = None
    if mask is not None:
        block_mask = anyflex.create_block_mask(mask, None, None, length, keys)
    out = anyflex.flex_attention(query, key, value, score, block_mask, backend="cuda")
    if learns:
        assert isinstance(out, torch.Tensor)
        torch.autograd.backward(out, torch.zeros_like(out))


def _all_kernels(wanted: Sequence[Sample], jobs: int) -> Iterator[tuple[str, bytes]]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ANYFLEX_CACHE_DIR"] = f"{folder}/anyflex"
        os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
        os.environ.update(VARIABLES)
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            for done, kernels in enumerate(pool.map(compiled_for, wanted), 1):
                print(f"{done} of {len(wanted)}", file=sys.stderr, flush=True)
                yield from kernels.items()


def main() -> int:
    """Write the archive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=READY)
    parser.add_argument("--only", default=",".join(PATTERNS), help=f"of {', '.join(PATTERNS)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    wanted = args.only.split(",")
    if not set(wanted) <= PATTERNS.keys():
        parser.error(f"--only takes some of {', '.join(PATTERNS)}, got {args.only!r}")
    kernels = dict(_all_kernels(samples(wanted), args.jobs))
    fingerprint = CudaBackend("cuda", "cuda").fingerprint()
    write_ready_kernels(args.file, fingerprint, kernels)
    print(f"{args.file}: {len(kernels)} kernels, {args.file.stat().st_size} bytes, {fingerprint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
