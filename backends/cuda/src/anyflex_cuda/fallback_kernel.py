"""A spec compiled for a GPU none of whose own kernels may be taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyflex.plugin import Call, Spec
from anyflex_triton.building import CompiledFiles, Target, TritonKernel, Tuner

__all__ = ["PortableKernel"]


class PortableKernel(TritonKernel):
    """The portable kernels, with what `explain` says of that.

    Args:
        spec, source, target, overrides, tuner, files: as `TritonKernel`'s.
        whose: kernels those are, ``"Hopper's"``.
        reason: why they aren't taken.
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
        """Return what the portable kernels say, and the reason."""
        return f"{super().describe(call)} ({self._why})"
