"""Compilation of a program together with ptxas's report and its machine code."""

from __future__ import annotations

import io
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import triton
from compiling import HOPPER
from triton.backends.compiler import GPUTarget

from anyflex_triton.building import Program

__all__ = ["compiled", "compiling", "sass_of", "spills_of"]

BINARIES = Path(os.path.dirname(triton.__file__), "backends/nvidia/bin")


@contextmanager
def compiling() -> Iterator[None]:
    """Within this context programs are compiled without the cache, and Triton prints ptxas's
    report, which it otherwise drops."""
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True
        yield


def compiled(program: Program, target: GPUTarget = HOPPER) -> tuple[Any, str]:
    """Return (compiled kernel, ptxas's report). Call it within `compiling`."""
    said = io.StringIO()
    with redirect_stdout(said):
        made = triton.compile(program.source(), target=target, options=program.options.keywords())
    told = said.getvalue()
    assert "bytes spill stores" in told, told
    return made, told


def spills_of(told: str) -> int:
    """Return the bytes of spills that ptxas reports."""
    stores = re.search(r"(\d+) bytes spill stores", told)
    assert stores is not None, told
    return int(stores[1])


def sass_of(made: Any) -> str:
    """Return the kernel's machine code."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "k.cubin")
        cubin.write_bytes(made.asm["cubin"])
        return subprocess.run(
            [BINARIES / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True
        ).stdout
