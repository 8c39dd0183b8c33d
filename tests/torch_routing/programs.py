"""Programs in the manner of torch's own tests of flex attention: score functions, mask functions
and sizes, with the tensors that they capture.

Each function takes one pair of scalars at a time, or vectors of pairs: the oracle gives it those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

__all__ = ["PROGRAMS", "SCORES", "SIZES", "Captured", "Program", "Sizes", "captured"]


@dataclass(frozen=True)
class Sizes:
    """B, Hq, Hkv, L, S, E, Ev."""

    batch: int
    heads: int
    key_heads: int
    q_length: int
    kv_length: int
    head_dim: int
    value_dim: int


SIZES = {
    "square": Sizes(2, 2, 2, 64, 64, 16, 16),
    "ragged": Sizes(2, 4, 2, 45, 83, 16, 24),
    "decode": Sizes(3, 6, 2, 1, 70, 8, 8),
}


@dataclass
class Captured:
    """Tensors that programs read. Those of floats are learned."""

    of_head: Tensor
    of_query: Tensor
    of_key: Tensor
    of_batch_head: Tensor
    grid: Tensor
    distances: Tensor
    scalar: Tensor
    documents_q: Tensor
    documents_kv: Tensor
    lengths: Tensor
    widths: Tensor
    allowed: Tensor

    def learned(self) -> list[Tensor]:
        tensors = [getattr(self, each.name) for each in fields(self)]
        return [tensor for tensor in tensors if tensor.is_floating_point()]

    def copied(self, dtype: torch.dtype) -> Captured:
        """The same values as leaves of another floating type."""

        def leaf(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            return tensor.detach().to(dtype).requires_grad_()

        return Captured(*[leaf(getattr(self, each.name)) for each in fields(self)])


def captured(sizes: Sizes) -> Captured:
    """Random tensors, of float32 values in float64."""
    draw = torch.Generator().manual_seed(7)
    batch, heads, rows, columns = sizes.batch, sizes.heads, sizes.q_length, sizes.kv_length

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw).double().mul(0.5).add(0.25)

    positions_q = torch.arange(rows) * columns // rows
    starts = torch.arange(batch)[:, None] * 3
    return Captured(
        of_head=random(heads),
        of_query=random(rows),
        of_key=random(columns),
        of_batch_head=random(batch, heads),
        grid=random(rows, columns),
        distances=random(rows + columns),
        scalar=random(),
        documents_q=(positions_q + starts) // 13,
        documents_kv=(torch.arange(columns) + starts) // 13,
        # The first batch entry has no key at all: all of its rows are empty.
        lengths=torch.tensor([0, 17, columns][-batch:]) if batch > 2 else torch.tensor([0, 29]),
        widths=torch.arange(heads) * 9 + 4,
        allowed=torch.rand(rows, columns, generator=draw) < 0.3,
    )


Mod = Callable[..., Any]
Maker = Callable[[Captured, Sizes], Mod]


@dataclass(frozen=True)
class Program:
    """A score function, a mask function, or both."""

    score: Maker | None = None
    mask: Maker | None = None


def _where(condition: Any, score: Tensor, other: float) -> Tensor:
    return torch.where(condition, score, other)


def _cap(score: Tensor) -> Tensor:
    return 2.0 * torch.tanh(score / 2.0)


def _counted(limit: float, step: int) -> Mod:
    def score(s, b, h, q, k):
        return _where((q - k) % step < 3, s * limit, -limit)

    return score


def _grid_by_steps(c: Captured) -> Mod:
    def score(s, b, h, q, k):
        # The oracle gives vectors of pairs, of which the steps would make a matrix.
        bias = c.grid[q][k] if q.dim() == 0 else c.grid[q, k]
        return s * c.of_batch_head[b, h] + bias

    return score


SCORES: dict[str, Maker] = {
    "causal_score": lambda c, z: lambda s, b, h, q, k: _where(q >= k, s, -torch.inf),
    "later_only": lambda c, z: lambda s, b, h, q, k: _where(q <= k, s, -torch.inf),
    "relative": lambda c, z: lambda s, b, h, q, k: s + 0.1 * (q - k),
    "relative_later": lambda c, z: lambda s, b, h, q, k: _where(q <= k, s + (q - k), -torch.inf),
    "doubled": lambda c, z: lambda s, b, h, q, k: s * 2,
    "squared": lambda c, z: lambda s, b, h, q, k: s * s,
    "sine": lambda c, z: lambda s, b, h, q, k: torch.sin(s) + torch.cos(s * 0.5),
    "soft_cap": lambda c, z: lambda s, b, h, q, k: _cap(s),
    "clamped": lambda c, z: lambda s, b, h, q, k: torch.clamp(s, -1.0, 1.5),
    "sigmoid": lambda c, z: lambda s, b, h, q, k: torch.sigmoid(s) * 3.0,
    "log_and_exp": lambda c, z: lambda s, b, h, q, k: torch.log1p(s.abs()) + torch.exp(-s * s),
    "parity": lambda c, z: lambda s, b, h, q, k: torch.where((q + k) % 2 == 0, s, s * 0.5),
    "numbers": lambda c, z: _counted(0.75, 5),
    "alibi": lambda c, z: lambda s, b, h, q, k: s - c.of_head[h] * (q - k).abs(),
    "head_scale": lambda c, z: lambda s, b, h, q, k: s * c.of_head[h],
    "query_bias": lambda c, z: lambda s, b, h, q, k: s + c.of_query[q],
    "key_bias": lambda c, z: lambda s, b, h, q, k: s + c.of_key[k],
    "grid_bias": lambda c, z: lambda s, b, h, q, k: s + c.grid[q, k],
    "grid_by_steps": lambda c, z: _grid_by_steps(c),
    "distances": lambda c, z: lambda s, b, h, q, k: s + c.distances[q - k + z.kv_length - 1],
    "temperature": lambda c, z: lambda s, b, h, q, k: s * c.scalar,
    "several": lambda c, z: lambda s, b, h, q, k: s * c.of_head[h] + c.of_query[q] * c.of_key[k],
    "read_twice": lambda c, z: lambda s, b, h, q, k: s + c.of_key[k] * c.of_key[q],
    "without_score": lambda c, z: lambda s, b, h, q, k: c.of_query[q] * c.of_key[k],
    "documents_score": lambda c, z: (
        lambda s, b, h, q, k: _where(c.documents_q[b, q] == c.documents_kv[b, k], s, -torch.inf)
    ),
}

MASKS: dict[str, Maker] = {
    "all": lambda c, z: noop_mask,
    "none": lambda c, z: lambda b, h, q, k: q < 0,
    "causal": lambda c, z: lambda b, h, q, k: q >= k,
    "causal_offset": lambda c, z: lambda b, h, q, k: q + (z.kv_length - z.q_length) >= k,
    "window": lambda c, z: lambda b, h, q, k: (q - k).abs() <= 11,
    "head_windows": lambda c, z: lambda b, h, q, k: (q - k).abs() <= c.widths[h],
    "prefix": lambda c, z: lambda b, h, q, k: (k < 9) | (q >= k),
    "documents": lambda c, z: lambda b, h, q, k: c.documents_q[b, q] == c.documents_kv[b, k],
    "lengths": lambda c, z: lambda b, h, q, k: k < c.lengths[b],
    "dilated": lambda c, z: lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0),
    "table": lambda c, z: lambda b, h, q, k: c.allowed[q, k],
    "blocks": lambda c, z: lambda b, h, q, k: (q // 8 + k // 8) % 2 == 0,
    "and_masks": lambda c, z: and_masks(
        lambda b, h, q, k: q >= k, lambda b, h, q, k: q - k <= 20, noop_mask
    ),
    "or_masks": lambda c, z: or_masks(
        lambda b, h, q, k: k < 4, lambda b, h, q, k: (q - k).abs() <= 6
    ),
}

PROGRAMS: dict[str, Program] = {
    "plain": Program(),
    **{name: Program(score=maker) for name, maker in SCORES.items()},
    **{name: Program(mask=maker) for name, maker in MASKS.items()},
    **{
        f"{score}_{mask}": Program(SCORES[score], MASKS[mask])
        for score, mask in (
            ("alibi", "causal"),
            ("soft_cap", "window"),
            ("grid_bias", "documents"),
            ("distances", "and_masks"),
            ("key_bias", "lengths"),
            ("several", "or_masks"),
        )
    },
}
