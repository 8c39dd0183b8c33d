"""Oracle (a): attention by a dense float64 formula and plain autograd. It takes every case.

The mask is evaluated on broadcast index tensors. The score mod is evaluated on vectors of the live
pairs only, so that a mod's value at a dead pair can't reach any result or gradient:
scores[live] = mod(scores[live], b, h, q, k).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyflex.testing.results import Forward

__all__ = ["dense_attention", "dense_mask"]


def dense_mask(
    mask_mod: Callable[..., Any] | None, batch: int, heads: int, q_length: int, kv_length: int
) -> Tensor:
    """Bool [batch, heads, q_length, kv_length]: True where the pair is live."""
    shape = (batch, heads, q_length, kv_length)
    if mask_mod is None:
        return torch.ones(shape, dtype=torch.bool)
    indices = [
        torch.arange(size).reshape([size if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(shape)
    ]
    live = mask_mod(*indices)
    if isinstance(live, bool):
        live = torch.tensor(live)
    assert live.dtype == torch.bool
    dense: Tensor = live.expand(shape)
    return dense


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    round_weights: Callable[[Tensor], Tensor] | None = None,
    dropout_p: float = 0.0,
    kept: Tensor | None = None,
) -> Forward:
    """out, lse and max_scores, differentiable (max_scores is not).

    Args:
        query: [B, Hq, L, E], float64.
        key: [Bkv, Hkv, S, E], Bkv 1 or B, Hq a multiple of Hkv; any length may be 0.
        value: [Bkv, Hkv, S, Ev].
        mask: bool, broadcastable to [B, Hq, L, S]; None for all live.
        round_weights: applied to the softmax before the product with value: as by an
            implementation that rounds it.
        dropout_p, kept: the other pairs than `kept`, bool, have no part in the product with value,
            and kept weights are divided by 1 - dropout_p; lse and max_scores are of all pairs.
    """
    batch, heads, q_length, _ = query.shape
    group = heads // key.shape[1]
    kv_length = key.shape[2]
    key = key.expand(batch, -1, -1, -1).repeat_interleave(group, dim=1)
    value = value.expand(batch, -1, -1, -1).repeat_interleave(group, dim=1)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    shape = (batch, heads, q_length, kv_length)
    live = (torch.ones((), dtype=torch.bool) if mask is None else mask).expand(shape)
    scores = _scores(query, key, live) * scale
    pairs = live.nonzero(as_tuple=True)
    modified = scores[pairs]
    if score_mod is not None:
        modified = torch.as_tensor(score_mod(modified, *pairs))
        # A mod may return a number, an integer, or a wider float: cast once to the score type.
        modified = modified.to(scores.dtype).expand(len(pairs[0]))
    scores = torch.full(shape, -math.inf, dtype=scores.dtype).index_put(pairs, modified)

    dead = (scores == -math.inf).all(-1, keepdim=True)
    # -inf - -inf is NaN, also in the gradient: dead rows go through softmax as zeros.
    safe = torch.where(dead, 0.0, scores)
    weights = torch.where(live & ~dead, torch.softmax(safe, -1), 0.0)
    if round_weights is not None:
        weights = round_weights(weights)
    seen = live
    if kept is not None:
        seen = live & kept
        weights = torch.where(kept, weights / (1 - dropout_p), 0.0)
    out = _weighted_sum(weights, value, seen)
    lse = torch.where(dead[..., 0], -math.inf, torch.logsumexp(safe, -1))
    with torch.no_grad():
        maximum = (
            scores.amax(-1) if kv_length else torch.full(shape[:3], -math.inf, dtype=scores.dtype)
        )
    return Forward(out, lse, maximum)


def _scores(query: Tensor, key: Tensor, live: Tensor) -> Tensor:
    """[B, H, L, E] times [B, H, S, E] over E; dead pairs don't reach the gradients."""
    if bool(query.isfinite().all()) and bool(key.isfinite().all()):
        return torch.einsum("bhqe,bhke->bhqk", query, key)
    # 0 * NaN is NaN: each pair has operands of its own, and dead ones are 0.
    rows = torch.where(live.unsqueeze(-1), query.unsqueeze(3), 0.0)
    keys = torch.where(live.unsqueeze(-1), key.unsqueeze(2), 0.0)
    return (rows * keys).sum(-1)


def _weighted_sum(weights: Tensor, value: Tensor, live: Tensor) -> Tensor:
    """[B, H, L, S] times [B, H, S, Ev] over S, live pairs only."""
    if bool(value.isfinite().all()):
        return torch.einsum("bhqk,bhke->bhqe", weights, value)
    values = torch.where(live.unsqueeze(-1), value.unsqueeze(2), 0.0)
    return (weights.unsqueeze(-1) * values).sum(3)
