"""What a spec's kernels in Gluon are compiled with and given: as the portable ones', with mods for
Gluon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyflex.plugin import Spec
from anyflex_cuda.gluon_mods import gluon_source
from anyflex_cuda.gluon_program import GluonProgram
from anyflex_triton.programs import Programs

__all__ = ["GluonPrograms"]


class GluonPrograms(Programs):
    """Thread-safe. Its `mods` are for kernels in Gluon, its `program` makes such kernels.

    Args:
        spec: what the backend accepted.
        source: of the mods, by `anyflex_triton.mods.write_source`.
        overrides: the user's options by name.
    """

    made_as = GluonProgram

    def __init__(self, spec: Spec, source: str, overrides: Mapping[str, Any]) -> None:
        fast_tanh = bool(overrides.get("fast_tanh"))
        super().__init__(spec, gluon_source(source, fast_tanh), "hopper", overrides)
        if spec.mask_kind != "none":
            # Of forward, the only one to read it. A group of heads begins with its longest tiles:
            # the more groups, the later the last one's begin, and all others have ended when they
            # do. Under a causal mask 8 heads took 1.04 to 1.15 of the time on an H100.
            self.most_heads = None
