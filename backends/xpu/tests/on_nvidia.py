"""Conformance kit on an NVIDIA GPU, for the portable kernels with Intel's configurations.

    python backends/xpu/tests/on_nvidia.py [--jobs 16, or what else `anyflex conformance` takes]

It covers compiled code, bfloat16 and all cases, which are too slow for the interpreter. It shows
that these tiles, and descriptors that kernels create, give right numbers; it shows nothing about
Intel's compiler. Exits as `anyflex conformance` does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anyflex.plugin import Artifacts, Kernel, Spec
from anyflex_triton import TritonBackend

if TYPE_CHECKING:
    from anyflex_triton.building import Target

__all__ = ["NAME", "IntelTilesBackend", "main"]

NAME = "cuda.intel_tiles"


class IntelTilesBackend(TritonBackend):
    """`cuda.triton` with the config table's entries for Intel's GPUs."""

    priority = TritonBackend.priority - 1

    def target(self) -> Target:
        return "xpu"

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        from triton.runtime import _allocation

        # Descriptors that a kernel creates are in memory that Triton allocates at launch. Its
        # public setting is per thread, and backward runs in autograd's thread.
        _allocation._allocator = _SCRATCH
        return super().compile(spec, artifacts)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


_SCRATCH = ContextVar("scratch", default=_allocate)


def main() -> int:
    """Run the kit with this file's backend registered, as an installed plugin is."""
    with tempfile.TemporaryDirectory() as folder:
        facts = Path(folder, "intel_tiles-0.0.0.dist-info")
        facts.mkdir()
        facts.joinpath("METADATA").write_text(
            "Metadata-Version: 2.1\nName: intel-tiles\nVersion: 0.0.0\n"
        )
        facts.joinpath("entry_points.txt").write_text(
            f"[anyflex.backends.v1]\n{NAME} = {Path(__file__).stem}:{IntelTilesBackend.__name__}\n"
        )
        path = [folder, str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        command = [sys.executable, "-m", "anyflex", "conformance", "--backend", NAME]
        return subprocess.run([*command, *sys.argv[1:]], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
