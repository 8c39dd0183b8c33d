"""Sources of one spec's kernels, each written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anyflex.plugin import Spec
from anyflex_mps.command_buffers import BufferedWork
from anyflex_mps.shaders import Shaders
from anyflex_mps.text import Shader

__all__ = ["SpecShaders"]


class SpecShaders:
    """Sources of a spec's kernels, and what its launches need.

    Args:
        compiled: kernels by source.
        cores: of the GPU.
    """

    def __init__(self, spec: Spec, compiled: Shaders, cores: int) -> None:
        self.spec = spec
        self.compiled = compiled
        self.cores = cores
        self.buffered = BufferedWork(cores)
        self._written: dict[tuple[object, ...], Shader] = {}

    def written(self, write: Callable[..., Shader], *given: Any) -> Shader:
        """Return what a function of the spec and the given arguments writes. Two threads may
        write the same; equal sources are one kernel."""
        key = (write, *given)
        found = self._written.get(key)
        if found is None:
            found = self._written[key] = write(self.spec, *given)
        return found
