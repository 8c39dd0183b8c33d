"""Attention by a dense float64 formula: what the backend's results are compared with."""

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
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [B, Hq, L, Ev] and lse [B, Hq, L] in float64, differentiable."""
    batch, heads, length, width = query.shape
    ratio = heads // key.shape[1]
    key, value = (
        each.double().expand(batch, -1, -1, -1).repeat_interleave(ratio, 1)
        for each in (key, value)
    )
    b, h, q, k = torch.meshgrid(
        *(torch.arange(size) for size in (batch, heads, length, key.shape[2])), indexing="ij"
    )
    scores = query.double() @ key.mT * width**-0.5
    live = torch.ones_like(scores, dtype=torch.bool)
    if score_mod is not None:
        scores = score_mod(scores, b, h, q, k)
    if mask_mod is not None:
        live = mask_mod(b, h, q, k)
    dead = ~live.any(-1, keepdim=True)
    # softmax of a row of -inf is NaN, and so is its gradient.
    safe = scores.masked_fill(~live & ~dead, -torch.inf)
    weights = safe.softmax(-1).masked_fill(dead, 0)
    lse = safe.logsumexp(-1).masked_fill(dead.squeeze(-1), -torch.inf)
    return weights @ value, lse
