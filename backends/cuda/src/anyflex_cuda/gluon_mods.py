"""Mods for kernels in Gluon: the portable text, with operations that need a layout rebound.

A Gluon kernel may call functions that are ``triton.jit``: Triton compiles them with the caller's
language, and elementwise functions of ``tl`` keep a tensor's layout. So the text of
`anyflex_triton` serves here too, with six of its names bound to `mod_operations`, and two to
`mask_select_ptx`.
"""

from __future__ import annotations

from anyflex_triton.building import IMPORTED_OPERATIONS

__all__ = ["gluon_source"]

_IMPORTED = f"{IMPORTED_OPERATIONS}from anyflex_cuda import mask_select_ptx, mod_operations\n"
_REBOUND = {
    "tl.full(": "mod_operations.full(",
    "ops.spread(": "mod_operations.spread(",
    "ops.load_once(": "mod_operations.load_once(",
    "ops.along(": "mod_operations.along(",
    "ops.accumulate(": "mod_operations.accumulate(",
    "ops.tanh_capped(": "mod_operations.tanh_capped(",
    "ops.choose(": "mask_select_ptx.choose(",
    "ops.choose_by(": "mask_select_ptx.choose_by(",
}


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
