"""What a spec's kernels in Gluon are compiled with and given: as the portable ones', with mods for
Gluon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anyflex.plugin import Spec
from anyflex_cuda.gluon_mods import gluon_source
from anyflex_cuda.gluon_program import GluonProgram
from anyflex_triton.launch import Options, Program, Types
from anyflex_triton.programs import Programs

__all__ = ["GluonPrograms"]


class GluonPrograms(Programs):
    """Thread-safe. Its `mods` are for kernels in Gluon, its `program` makes such kernels.

    Args:
        spec: what the backend accepted.
        source: of the mods, by `anyflex_triton.mods.write_source`.
        overrides: the user's options by name.
    """

    def __init__(self, spec: Spec, source: str, overrides: Mapping[str, Any]) -> None:
        super().__init__(spec, gluon_source(source), "hopper", overrides)

    def program(
        self,
        key: object,
        function: Any,
        types: Mapping[str, Types],
        constants: Mapping[str, object],
        aligned: Sequence[str],
        options: Options,
    ) -> Program:
        """As the portable one's, of a function made by ``gluon.jit``."""
        with self._lock:
            found = self.existing.get(key)
            if found is None:
                found = GluonProgram(function, types, constants, aligned, options)
                self.existing[key] = found
        return found
