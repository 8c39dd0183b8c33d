"""Signatures of a spec's kernels in Gluon: those of the portable kernels, with mods for Gluon.

The text of `anyflex_triton` serves kernels in Gluon too, because they may call functions that are
``triton.jit``: Triton compiles them with the caller's language, and elementwise functions of
``tl`` keep a tensor's layout. Some of its names are bound to `mod_operations`, whose operations
need a layout, and two to `mask_select_ptx`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from anyflex.plugin import Call, Spec
from anyflex_cuda.gluon_launch import GluonProgram, is_aligned
from anyflex_cuda.kernel_arguments import TYPES
from anyflex_triton.building import (
    IMPORTED_OPERATIONS,
    CompiledFiles,
    KernelInputs,
    Mods,
    Program,
    Programs,
    mask_scores_source,
    pair_reads_source,
)

__all__ = [
    "BACKWARD_FIT",
    "BACKWARD_OPTIONS",
    "FORWARD_FIT",
    "FORWARD_OPTIONS",
    "GluonPrograms",
    "gluon_source",
    "mod_constants",
    "refused_options",
]

T = TypeVar("T")

FORWARD_FIT, BACKWARD_FIT = "anyflex_cuda.fit", "anyflex_cuda.backward_fit"
"""Keys of a call's fits in `Call.kept`."""
_OF_ALL = ("finer_mask", "autotune")
FORWARD_OPTIONS = ("block_m", "block_n", "num_warps", "num_stages", *_OF_ALL)
BACKWARD_OPTIONS = (
    "dkv_block_m", "dkv_block_n", "dq_block_m", "dq_block_n", "backward_num_warps",
    "backward_num_stages", *_OF_ALL,
)  # fmt: skip
"""Options of the portable kernels' forward and backward, each of which selects those kernels."""

_IMPORTED = f"{IMPORTED_OPERATIONS}from anyflex_cuda import mask_select_ptx, mod_operations\n"
_REBOUND = {
    "tl.full(": "mod_operations.full(",
    "ops.spread(": "mod_operations.spread(",
    "ops.load_once(": "mod_operations.load_once(",
    "ops.along(": "mod_operations.along(",
    **{
        f"ops.{name}(": f"mod_operations.{name}("
        for name in (
            "add_dense",
            "along_chunks",
            "along_dense",
            "along_distances",
            "along_periods",
            "dense_rows",
            "distant_keys",
            "key_beside",
            "keys_of",
            "load_dense",
            "rows_of",
        )
    },
    "ops.accumulate(": "mod_operations.accumulate(",
    "ops.tanh_capped(": "mod_operations.tanh_capped(",
    "ops.choose(": "mask_select_ptx.choose(",
    "ops.choose_by(": "mask_select_ptx.choose_by(",
}


class GluonPrograms(Programs):
    """Programs of a spec in Gluon: `mods` are for such kernels, and `program` makes them.
    Thread-safe.

    Args:
        spec: spec that the backend accepted.
        source: text of the mods, by `anyflex_triton.mods.write_source`.
        fast_tanh: the user's option, where these kernels may take it.
        files: cache of compiled kernels on disk; see `Program`.
    """

    made_as = GluonProgram

    def __init__(
        self,
        spec: Spec,
        source: str,
        fast_tanh: bool = False,
        files: CompiledFiles | None = None,
    ) -> None:
        source += mask_scores_source(spec) + pair_reads_source(spec)
        source = gluon_source(source, fast_tanh)
        super().__init__(KernelInputs(spec, source, "hopper", {}, files=files))
        self.types.update(TYPES)
        if not self.is_packed:
            self.constants["tile_list"] = None
        self._decoding: dict[object, Program] = {}
        # If False, pointers are checked too: the spec may be unaligned because of strides alone.
        self._begins_aligned = spec.alignment == ("aligned", "aligned", "aligned")
        if spec.mask_kind != "none":
            # None makes all heads one group. A group begins with its longest tiles of query rows:
            # with more groups, the last one's begin when most programs have nothing else to do.
            # Under a causal mask groups of 8 heads took 1.04 to 1.15 of the time on an H100.
            self.most_heads = None

    def kept_fit(self, call: Call, key: str, make: Callable[[Call], T]) -> T | None:
        """Return the cached fit of a call's tensors to kernels with TMA, or None where these don't
        take the call.

        Args:
            key: `FORWARD_FIT` or `BACKWARD_FIT`.
            make: returns the fit, which follows from shapes and strides, for aligned pointers.
        """
        if not self._begins_aligned:
            pointers = call.query.data_ptr() | call.key.data_ptr() | call.value.data_ptr()
            if not is_aligned(pointers):
                return None
        # Calls of shapes that were seen before need neither a function nor its arguments.
        found: tuple[T | None] | None = None if call.kept is None else call.kept.get(key)
        if found is None:
            # None is a result too.
            found = self.kept(call, key, lambda: (make(call),))
        return found[0]

    def decoding(self, key: object, make: Callable[[], Program]) -> Program:
        """Return the decoding kernel that `make` made for this key, which must tell its
        signature: writing that takes longer, and a growing KV cache asks for each length."""
        found = self._decoding.get(key)
        if found is None:
            found = self._decoding[key] = make()
        return found


def mod_constants(mods: Mods, totals: Sequence[Tensor] = ()) -> dict[str, object]:
    """Return the constants of a kernel that reads nothing early.

    Args:
        totals: the captured tensors' gradients that the kernel adds to.
    """
    return {
        "SCORE_MOD": mods.score_mod,
        "SCORE_MOD_BACKWARD": mods.score_mod_backward,
        "CAPTURED_GRADIENTS": mods.captured_gradients if totals else None,
        "MASK_MOD": mods.mask_mod,
    }


def refused_options(given: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """Return why a call with options takes the portable kernel, or None.

    Args:
        given: the user's options by name. One that is False selects nothing.
        names: options that Hopper's kernel doesn't have.
    """
    found = [name for name in names if given.get(name)]
    return f"the portable kernels have {' and '.join(found)}, and it doesn't" if found else None


def gluon_source(source: str, fast_tanh: bool = False) -> str:
    """Return the source for kernels in Gluon, given the source for portable ones.

    Indices and scores must come in layouts that broadcast with each other: a score [M, N] of
    layout L, ``q_idx`` [M, 1] and ``kv_idx`` [1, N], both of layout L too.

    Args:
        source: text by `anyflex_triton.mods.write_source`, before or after `source_for`.
        fast_tanh: value of the option.
    """
    text = source.replace(IMPORTED_OPERATIONS, _IMPORTED)
    for name, ours in _REBOUND.items():
        text = text.replace(name, ours)
    if fast_tanh:
        text = text.replace("mod_operations.tanh_capped(", "mod_operations.fast_tanh_capped(")
    return text
