"""Status codes of the native library, as exceptions."""

from __future__ import annotations

from anyflex.plugin import Call, ModIndexError
from anyflex_cpu import structs

__all__ = ["TOO_SMALL", "raise_for"]

READ_OUTSIDE = 1
TOO_SMALL = 2
"""AF_WORKSPACE_TOO_SMALL."""

_MODS = ("score_mod", "mask_mod")


def raise_for(status: int, error: structs.Error, call: Call) -> None:
    """Raise the exception for a status other than AF_OK.

    Raises:
        ModIndexError: a live pair reads outside of a captured tensor.
        RuntimeError: the library refuses what no spec of ours should lead to.
    """
    if status != READ_OUTSIDE:
        name = structs.STATUS.get(status, "an unknown status")
        raise RuntimeError(f"the native library returned {name} ({status})")
    shape = list(call.captured[error.captured].shape)
    mod = _MODS[error.mod]
    raise ModIndexError(
        f"{mod} reads captured tensor {error.captured}, shape {shape}, outside of it: index "
        f"{error.index} of dimension {error.dim} at a live pair",
        operation="captured[...]",
        hint="An index lies in -N..N-1: clamp it, or mask these pairs.",
    )
