"""Signatures of a spec's kernels in Gluon: the portable ones', with mods for Gluon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from anyflex.plugin import Call, Spec
from anyflex_cuda.gluon_launch import GluonProgram, is_aligned
from anyflex_cuda.gluon_mods import gluon_source
from anyflex_triton.building import CompiledFiles, Programs, mask_scores_source

__all__ = ["GluonPrograms"]

T = TypeVar("T")


class GluonPrograms(Programs):
    """Thread-safe. Its `mods` are for kernels in Gluon, its `program` makes such kernels.

    Args:
        spec: what the backend accepted.
        source: of the mods, by `anyflex_triton.mods.write_source`.
        overrides: the user's options by name.
        files: where compiled kernels are kept; see `Program`.
    """

    made_as = GluonProgram

    def __init__(
        self,
        spec: Spec,
        source: str,
        overrides: Mapping[str, Any],
        files: CompiledFiles | None = None,
    ) -> None:
        fast_tanh = bool(overrides.get("fast_tanh"))
        source = gluon_source(source + mask_scores_source(spec), fast_tanh)
        super().__init__(spec, source, "hopper", overrides, files=files)
        # Else pointers are looked at: strides alone may be odd.
        self._begins_aligned = spec.alignment == ("aligned", "aligned", "aligned")
        if spec.mask_kind != "none":
            # Of tiles of query rows. A group of heads begins with its longest tiles: the more
            # groups, the later the last one's begin, and all others have ended when they do. Under
            # a causal mask forward with 8 heads took 1.04 to 1.15 of the time on an H100.
            self.most_heads = None

    def kept_fit(self, call: Call, make: Callable[[Call], T]) -> T | None:
        """Return what TMA's kernels need to know of a call's tensors, or None where they don't
        take the call.

        Args:
            make: returns it, given that pointers are aligned: it follows from shapes and strides.
        """
        if not self._begins_aligned:
            query, key, value = call.query, call.key, call.value
            if not is_aligned(query.data_ptr() | key.data_ptr() | value.data_ptr()):
                return None
        kept = call.kept
        if kept is None:
            return make(call)
        # False: nobody has asked.
        fit: T | Literal[False] = kept.get("anyflex_cuda.fit", False)
        if fit is False:
            fit = kept["anyflex_cuda.fit"] = make(call)
        return fit
