"""Compilation for a GPU that isn't there: calls compile their kernels and launch none.

Images are built, and wheels are made, on machines without a GPU. Triton compiles for any
architecture that it is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anyflex.plugin import ArgumentError

__all__ = ["AbsentGpu", "compiling_for", "in_force"]


class AbsentGpu:
    """A GPU that calls compile for.

    Args:
        generation: its compute capability, times 10.

    Attributes:
        target: the compiler's.
        kernels: name among a spec's files -> content, of each kernel that a call needs.
    """

    def __init__(self, generation: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.generation = generation
        self.target: Any = GPUTarget("cuda", generation, 32)
        self.kernels: dict[str, bytes] = {}


_entered: list[AbsentGpu] = []


def in_force() -> AbsentGpu | None:
    """Return the GPU of the innermost block of `compiling_for`, or None."""
    return _entered[-1] if _entered else None


@contextmanager
def compiling_for(arch: str) -> Iterator[AbsentGpu]:
    """Let calls of CPU tensors compile what they would run on a GPU of NVIDIA's, in a ``with``
    block. Their results are undefined. The block holds for the whole process, as
    `anyflex.testing.posing` does.

    Args:
        arch: as in ``"sm_90"``.

    Raises:
        ArgumentError: no such architecture, or Triton's interpreter is on.
    """
    from anyflex.testing import posing
    from anyflex_triton.program import INTERPRETED

    found = re.fullmatch(r"sm_([1-9]\d+)", arch)
    if found is None:
        raise ArgumentError(f"arch must be an architecture of NVIDIA's as 'sm_90', got {arch!r}")
    if INTERPRETED:
        raise ArgumentError("nothing is compiled under TRITON_INTERPRET=1; unset it")
    gpu = AbsentGpu(int(found[1]))
    _entered.append(gpu)
    try:
        with posing("cuda", arch=arch):
            yield gpu
    finally:
        _entered.remove(gpu)
