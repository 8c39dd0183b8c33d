"""Masks and scores of a layer as mods, whose indices are positions in a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import anyflex

__all__ = ["mask_mod", "score_mod"]

Mod = Callable[..., Any]


def mask_mod(causal: bool, window: int | None, both_sides: bool) -> Mod | None:
    """Return the mask mod of a layer, or None where a token sees every other.

    Args:
        causal: a token sees no later ones.
        window: tokens that it sees, itself included; None: all.
        both_sides: it sees as many on its right too, unless it is causal.
    """
    if window is None:
        return anyflex.masks.causal() if causal else None
    if causal:
        return anyflex.masks.causal_window(window)
    return anyflex.masks.sliding_window(window - 1, window - 1 if both_sides else 0)


def score_mod(
    alibi_slopes: list[float] | None, softcap: float | None, both_sides: bool
) -> Mod | None:
    """Return the score mod of a layer, or None where scores stay as they are.

    Args:
        alibi_slopes: one for each query head.
        softcap: applied before ALiBi.
        both_sides: ALiBi counts distances to later tokens too.
    """
    mods: list[Mod] = []
    if softcap is not None:
        mods.append(anyflex.mods.softcap(softcap))
    if alibi_slopes is not None:
        # On torch's default device, which is the model's while vLLM makes it.
        slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
        mods.append(anyflex.mods.alibi(slopes, symmetric=both_sides))
    if len(mods) < 2:
        return mods[0] if mods else None
    return anyflex.mods.compose(*mods)
