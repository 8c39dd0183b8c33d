"""Attention by a dense float64 formula: what the backend's results are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["assert_near", "dense_attention", "dense_gradients"]

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
STEPS = {torch.float32: 64, torch.bfloat16: 3, torch.float16: 3}
"""Number of roundings that a result may be off, beside the error of its own dtype."""


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
        live = mask_mod(b, h, q, k).expand(live.shape)
    dead = ~live.any(-1, keepdim=True)
    # softmax of a row of -inf is NaN, and so is its gradient.
    safe = scores.masked_fill(~live & ~dead, -torch.inf)
    weights = safe.softmax(-1).masked_fill(dead, 0)
    lse = safe.logsumexp(-1).masked_fill(dead.squeeze(-1), -torch.inf)
    return weights @ value, lse


def dense_gradients(
    inputs: tuple[Tensor, ...],
    dout: Tensor,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value in float64."""
    leaves = tuple(each.detach().double().requires_grad_() for each in inputs)
    out, _ = dense_attention(*leaves, score_mod, mask_mod)
    return torch.autograd.grad(out, leaves, dout.double())


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype, what: str = "") -> None:
    """Compare relative to the largest value: both are sums of many terms."""
    wanted = wanted.detach()
    assert torch.equal(found.isinf(), wanted.isinf()), what
    difference = (found.detach().double() - wanted).masked_fill(wanted.isinf(), 0).abs()
    largest = float(wanted.nan_to_num(0, 0, 0).abs().max()) if wanted.numel() else 0.0
    limit = STEPS[dtype] * ROUNDING[dtype] * max(1.0, largest)
    worst = float(difference.max()) if difference.numel() else 0.0
    assert worst <= limit, f"{what}: off by {worst:.3g}, allowed {limit:.3g}"
