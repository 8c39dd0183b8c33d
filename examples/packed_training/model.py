"""A byte-level causal transformer whose attention is `anyflex.flex_attention`.

Two functions make it more than plain attention: the mask keeps a position inside its own document
and before itself, and the score mod adds what each head has learned about distances. The mask is
made of ready-made ones, the score mod of a ready-made one and one of the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyflex import BlockMask, and_masks, create_block_mask, masks, mods
from packed_training.corpus import document_ids

__all__ = ["Attention", "ByteTransformer", "Mask", "ModelSize", "packed_mask"]

Mask: TypeAlias = BlockMask | Tensor
"""A block mask for anyflex; the dense formula of the gradient check takes a matrix."""

Attention: TypeAlias = Callable[..., Any]
"""Called as ``attention(query, key, value, score_mod=..., block_mask=...)``."""


_BLOCK = 64
"""Documents are short: smaller blocks than the usual 128 leave more of them out."""


@dataclass(frozen=True)
class ModelSize:
    """Args: layers, heads, head_dim, and how many distances have a bias of their own."""

    layers: int = 2
    heads: int = 2
    head_dim: int = 64
    distances: int = 64

    @property
    def width(self) -> int:
        """Features of a position."""
        return self.heads * self.head_dim


def packed_mask(tokens: Tensor) -> BlockMask:
    """Build the mask of packed rows: causal, and never across a document's border.

    Args:
        tokens: int64 [rows, length].
    """
    packed = and_masks(masks.causal(), masks.document(document_ids(tokens)))
    rows, length = tokens.shape
    return create_block_mask(
        packed, rows, None, length, length, device=tokens.device, BLOCK_SIZE=_BLOCK
    )


class SelfAttention(nn.Module):
    """Attention with learned distances: a slope a head (ALiBi's, here trained), and a table for
    near positions."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.slopes = nn.Parameter(mods.alibi_slopes(size.heads))
        self.near = nn.Parameter(torch.zeros(size.heads, size.distances))
        # Every layer begins as the identity.
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor, mask: Mask, attention: Attention) -> Tensor:
        near, last = self.near, self.near.shape[1] - 1

        def near_distance(
            score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
        ) -> Tensor:
            return score + near[h, (q_idx - kv_idx).clamp(0, last)]

        score_mod = mods.compose(mods.alibi(self.slopes), near_distance)
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = attention(q, k, v, score_mod=score_mod, block_mask=mask)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention, then an MLP with squared ReLU, each behind a norm and added to the stream."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width)
        self.attention = SelfAttention(size)
        self.mlp_norm = nn.RMSNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, mask: Mask, attention: Attention) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask, attention)
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())  # type: ignore[no-any-return]


class ByteTransformer(nn.Module):
    """Predicts the next byte of packed documents."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(256, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        nn.init.normal_(self.embedding.weight, std=1.0)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor, attention: Attention, mask: Mask | None = None) -> Tensor:
        """Return logits [rows, length, 256] for tokens int64 [rows, length].

        All layers share one mask. `packed_mask` builds it, unless one is given in the form that
        `attention` understands.
        """
        mask = packed_mask(tokens) if mask is None else mask
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask, attention)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def loss(self, rows: Tensor, attention: Attention, mask: Mask | None = None) -> Tensor:
        """Return the mean cross entropy, in nats a byte, of int64 [rows, length + 1]."""
        logits = self(rows[:, :-1], attention, mask)
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
