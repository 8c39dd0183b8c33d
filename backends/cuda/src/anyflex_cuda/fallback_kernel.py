"""Portable kernels of a spec on a GPU whose own kernels aren't taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyflex.plugin import Call, Spec
from anyflex_triton.building import CompiledFiles, Target, TritonKernel, Tuner

__all__ = ["PortableKernel"]


class PortableKernel(TritonKernel):
    """The portable kernels, with a reason for `explain`.

    Args:
        spec, source, target, overrides, tuner, files: as in `TritonKernel`.
        whose: owner of the kernels that aren't taken, ``"Hopper's"``.
        reason: why these aren't taken.
    """

    def __init__(
        self,
        spec: Spec,
        source: str,
        target: Target,
        overrides: Mapping[str, Any],
        tuner: Tuner | None,
        files: CompiledFiles,
        whose: str,
        reason: str,
    ) -> None:
        super().__init__(spec, source, target, overrides, tuner, files)
        self._why = f"not {whose} kernel: {reason}"

    def describe(self, call: Call) -> str:
        """Return the portable kernels' description, and the reason."""
        return f"{super().describe(call)} ({self._why})"
