"""Options of the portable kernels, each of which selects those kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BACKWARD_OPTIONS", "FORWARD_OPTIONS", "refused_options"]

_OF_ALL = ("finer_mask", "autotune")
FORWARD_OPTIONS = ("block_m", "block_n", "num_warps", "num_stages", *_OF_ALL)
BACKWARD_OPTIONS = (
    "dkv_block_m", "dkv_block_n", "dq_block_m", "dq_block_n", "backward_num_warps",
    "backward_num_stages", *_OF_ALL,
)  # fmt: skip


def refused_options(given: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """Return why a call with options takes the portable kernel, or None.

    Args:
        given: the user's options by name. One that is False selects nothing.
        names: options that Hopper's kernel doesn't have.
    """
    found = [name for name in names if given.get(name)]
    return f"the portable kernels have {' and '.join(found)}, and it doesn't" if found else None
