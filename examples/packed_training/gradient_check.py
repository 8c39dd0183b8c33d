"""Gradients of every parameter, through the whole model, against a dense float64 formula.

Nothing here uses anyflex: scores are a matrix, the mask is a matrix, softmax and gradients are
torch's own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from packed_training.corpus import document_ids
from packed_training.model import Attention, ByteTransformer

__all__ = ["GradientCheck", "check_gradients", "dense_attention", "dense_mask"]

_FLOOR = 3e-4
"""Relative error that is always allowed in float32. Most parameters come to 3e-6. The gradient of
a slope is a sum over all pairs of positions that nearly cancel: it came to 6e-5 at most in 84
checks (and to 3e-13 in float64, so that it is rounding)."""

_FLOOR_AUTOCAST = 2e-2
"""Allowed relative error where q, k and v are rounded to 8 bits of mantissa."""

_FACTOR = 8.0
"""Allowed multiple of the rounding error of the dense formula, run in the training precision."""

_MakesAutocast = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class GradientCheck:
    """Outcome of a check.

    Args:
        parameters: how many tensors were compared.
        worst: name of the parameter nearest to its limit, or beyond it.
        error: its relative error: |g - g64| / |g64|, Euclidean norms.
        limit: what was allowed for it.
        passed: every parameter was within its limit.
    """

    parameters: int
    worst: str
    error: float
    limit: float
    passed: bool


def dense_mask(tokens: Tensor) -> Tensor:
    """Return bool [rows, 1, length, length]: True where a query may see a key."""
    document = document_ids(tokens)
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, *, score_mod: Attention, block_mask: Tensor
) -> Tensor:
    """Attention as the formula says it; `block_mask` is `dense_mask`'s matrix.

    Args: query, key, value [B, H, L, E]. Every row must see at least one key.
    """
    batch, heads, length, features = query.shape
    device = query.device
    b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(heads, device=device).view(1, -1, 1, 1)
    q_idx = torch.arange(length, device=device).view(1, 1, -1, 1)
    kv_idx = torch.arange(length, device=device).view(1, 1, 1, -1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(features)
    scores = score_mod(scores, b, h, q_idx, kv_idx).masked_fill(~block_mask, -math.inf)
    return torch.softmax(scores, dim=-1).to(value.dtype) @ value


def check_gradients(
    model: ByteTransformer,
    rows: Tensor,
    attention: Attention,
    autocast: _MakesAutocast = nullcontext,
) -> GradientCheck:
    """Compare the gradients of one step, for each of the model's parameters.

    Three runs of the same loss: in the training precision through `attention`; in float64 through
    the dense formula, on the CPU; and in the training precision through the dense formula, whose
    error against float64 says how much rounding alone explains.

    Args:
        rows: int64 [rows, length + 1].
        autocast: makes the context that the training steps run in.
    """
    floor = _FLOOR if autocast is nullcontext else _FLOOR_AUTOCAST
    mask = dense_mask(rows[:, :-1])
    exact_model = copy.deepcopy(model).to("cpu", torch.float64)
    exact = _gradients(exact_model, rows.cpu(), dense_attention, mask.cpu())
    with autocast():
        found = _gradients(model, rows, attention, None)
        rounded = _gradients(model, rows, dense_attention, mask)

    verdicts = []
    for name, true in exact.items():
        norm = true.norm().item()
        error = (found[name].cpu().double() - true).norm().item()
        rounding = (rounded[name].cpu().double() - true).norm().item()
        limit = max(floor * norm, _FACTOR * rounding)
        # NaN compares false, so a NaN fails and sorts as the worst.
        passed = error <= limit
        nearness = error / limit if limit > 0 else (0.0 if passed else math.inf)
        nearness = math.inf if math.isnan(nearness) else nearness
        scale = norm if norm > 0 else 1.0
        verdicts.append((nearness, name, error / scale, limit / scale, passed))
    _, worst, error, limit, _ = max(verdicts)
    return GradientCheck(
        parameters=len(verdicts),
        worst=worst,
        error=error,
        limit=limit,
        passed=all(passed for *_, passed in verdicts),
    )


def _gradients(
    model: ByteTransformer, rows: Tensor, attention: Attention, mask: Tensor | None
) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss = model.loss(rows, attention, mask)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
