"""Mods for kernels in Gluon: the portable text, but for what a layout must be said for.

A Gluon kernel may call functions that are ``triton.jit``: Triton compiles them with the caller's
language, and elementwise functions of ``tl`` keep a tensor's layout. So the table of
`anyflex_triton` serves here too, with six names of its text bound to `mod_operations`, and
two to `mask_select_ptx`.
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
    """Return the module for kernels in Gluon whose text for portable ones is `source`.

    Indices and scores must come in layouts that broadcast with each other: a score [M, N] of
    layout L, ``q_idx`` [M, 1] and ``kv_idx`` [1, N], both of layout L too.

    Args:
        source: by `anyflex_triton.mods.write_source`, before or after `source_for`.
        fast_tanh: the option.
    """
    text = source.replace(IMPORTED_OPERATIONS, _IMPORTED)
    for name, ours in _REBOUND.items():
        text = text.replace(name, ours)
    if fast_tanh:
        text = text.replace("mod_operations.tanh_capped(", "mod_operations.fast_tanh_capped(")
    return text
