"""Kernels that `bench/triton_compiles.py` compiles, and the table's entries that must be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from anyflex_triton.configs import (
    _FLOAT32,
    _HALF,
    _TF32,
    Config,
    KernelName,
    Target,
    Traits,
    config_for,
)

__all__ = ["READING", "compiled", "entries", "learning_by_pair", "named", "run"]

TOOL = Path(__file__).parents[3] / "bench" / "triton_compiles.py"
TYPES = ("bfloat16", "float32")
DIMS = (64, 128, 256)
READING = ("documents", "alibi", "relative", "bias", "mixed")
"""Patterns of the tool whose mods read tensors."""


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script whose Triton compiles: this process has the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


def compiled(
    targets: str,
    patterns: str,
    kernels: str = "forward,decode,keys,queries",
    types: tuple[str, ...] = (*TYPES, "tf32"),
    dims: tuple[int, ...] = DIMS,
    *,
    recorded: bool = True,
) -> set[str]:
    """Compile as the tool does, fail where it finds a fault, and return what was compiled, as
    `entries` names it.

    Args:
        recorded: more spills than were recorded are a fault; False for what the record lacks.
    """
    done = run(
        TOOL, "--targets", targets, "--patterns", patterns, "--kernels", kernels,
        "--types", ",".join(types), "--dims", ",".join(map(str, dims)), "--brief",
        *(["--compare"] if recorded else []),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    lines = [line.split() for line in done.stdout.splitlines() if " warps=" in line]
    # Each line begins with target, type, head dim, kernel, pattern, tile, warps and stages.
    return {" ".join((*words[:4], *words[5:8])) for words in lines}


def named(target: Target, dtype: str, dim: int, kernel: KernelName, config: Config) -> str:
    """Return the name of a kernel with a config, in the form of `compiled` and `entries`."""
    return (
        f"{target} {dtype} {dim} {kernel} {config.block_m}x{config.block_n} "
        f"warps={config.options.num_warps} stages={config.options.num_stages}"
    )


def entries(target: Target) -> set[str]:
    """Return all of the table's entries for a target."""
    found = {
        named(target, dtype, dim, kernel, config)
        for dtype, table in zip(TYPES, (_HALF, _FLOAT32), strict=True)
        for kernel, by_dim in table[target].items()
        for dim, config in zip(DIMS, by_dim, strict=True)
    }
    for kernel, by_dim in _TF32.get(target, {}).items():
        found |= {
            named(target, "tf32", dim, kernel, config)
            for dim, config in zip(DIMS, by_dim, strict=False)
        }
    return found


def learning_by_pair(target: Target) -> set[str]:
    """Return the kernels of bfloat16 whose pairs add to an element that query and key both
    decide."""
    found = set()
    for dim in DIMS if target == "hopper" else DIMS[:2]:
        traits = Traits(dim, 2, score_reads_pairs=True, adds_by_pair=True)
        config = config_for(target, "queries", traits)
        found.add(named(target, "bfloat16", dim, "queries", config))
    return found
