"""Auxiliary outputs: what may be asked for beside the attention output, and what comes back."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["AuxOutput", "AuxRequest"]


class AuxRequest(NamedTuple):
    """Which auxiliary outputs `flex_attention` shall return.

    Args:
        lse: the natural log of each row's sum of exponentials.
        max_scores: each row's largest score after the mods.
    """

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """Auxiliary outputs, None for what was not asked for.

    Args:
        lse: [B, Hq, L], float32 (float64 for float64 inputs), differentiable. -inf for a row
            without a live key.
        max_scores: [B, Hq, L], same dtype, not differentiable. -inf for a row without a live key.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None
