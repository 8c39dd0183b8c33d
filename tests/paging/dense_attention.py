"""Attention of one sequence by the dense formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["dense_attention"]


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slot: int,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any],
) -> Tensor:
    """Return out [T, Hq, Ev] of the last T tokens of a sequence: query [T, Hq, E], key and value
    [S, Hkv, E | Ev]."""
    tokens, heads, dim = query.shape
    keys = key.shape[0]
    q = query.double().transpose(0, 1)
    group = heads // key.shape[1]
    k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
    at = (
        torch.tensor(slot),
        torch.arange(heads)[:, None, None],
        torch.arange(keys - tokens, keys)[None, :, None],
        torch.arange(keys)[None, None, :],
    )
    scores = q @ k.mT * dim**-0.5
    if score_mod is not None:
        scores = score_mod(scores, *at)
    return (scores.masked_fill(~mask_mod(*at), -torch.inf).softmax(-1) @ v).transpose(0, 1)
