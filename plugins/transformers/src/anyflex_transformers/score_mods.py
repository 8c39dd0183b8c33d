"""Score mods for what transformers adds to scores: soft caps, biases, dense masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import anyflex

__all__ = ["score_mod"]

ScoreMod = Callable[..., Any]


def score_mod(
    shape: tuple[int, int, int, int],
    softcap: float | None,
    position_bias: Tensor | None,
    mask: Tensor | None,
) -> ScoreMod | None:
    """Return the score mod of a call, or None where scores stay as they are.

    Args:
        shape: [B, Hq, L, S] of the scores.
        softcap: scores become ``softcap * tanh(score / softcap)``, before all else.
        position_bias: added to the scores; B, H and L may be 1, and S more than the keys.
        mask: likewise, floating; or bool, where True is live; or 0-d, the number of keys that are
            live, the first ones.

    Raises:
        ArgumentError: a tensor whose shape doesn't fit.
        ArgumentTypeError: one whose dtype doesn't.
    """
    mods = [] if softcap is None else [anyflex.mods.softcap(softcap)]
    if position_bias is not None:
        mods.append(anyflex.mods.dense_bias(_fitted("position_bias", position_bias, shape)))
    if mask is not None and mask.dim() == 0:
        mods.append(_live_before(mask))
    elif mask is not None:
        fitted = _fitted("attention_mask", mask, shape)
        if mask.dtype is torch.bool:
            mods.append(_live_in(fitted))
        else:
            mods.append(anyflex.mods.dense_bias(fitted))
    if len(mods) < 2:
        return mods[0] if mods else None
    return anyflex.mods.compose(*mods)


def _fitted(name: str, tensor: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Return the tensor with L rows, without copying it."""
    batch, heads, rows, keys = shape
    fits = tensor.dim() == 4 and tensor.shape[0] in (1, batch) and tensor.shape[1] in (1, heads)
    if not fits or tensor.shape[2] not in (1, rows) or tensor.shape[3] < keys:
        raise anyflex.ArgumentError(
            f"{name} must have shape [1 or {batch}, 1 or {heads}, 1 or {rows}, at least {keys}], "
            f"got {list(tensor.shape)}"
        )
    is_mask = name == "attention_mask"
    if not tensor.is_floating_point() and not (is_mask and tensor.dtype is torch.bool):
        needed = "bool (True is live) or floating" if is_mask else "floating"
        raise anyflex.ArgumentTypeError(f"{name} must be {needed}, got {tensor.dtype}")
    # A view takes longer than all else here.
    return tensor if tensor.shape[2] == rows else tensor.expand(-1, -1, rows, -1)


def _live_in(mask: Tensor) -> ScoreMod:
    one_batch, one_head = mask.shape[0] == 1, mask.shape[1] == 1

    def live_in(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        batch = 0 if one_batch else b
        head = 0 if one_head else h
        return torch.where(mask[batch, head, q_idx, kv_idx], score, -torch.inf)

    return live_in


def _live_before(count: Tensor) -> ScoreMod:
    def live_before(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(kv_idx < count, score, -torch.inf)

    return live_before
