"""A score mod of your own, with a learned tensor, checked against the dense formula."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import anyflex
from anyflex import masks

torch.manual_seed(0)
B, H, L, E = 2, 2, 150, 16
q, k, v = (torch.randn(B, H, L, E, dtype=torch.float64, requires_grad=True) for _ in range(3))
rate = nn.Parameter(torch.rand(H, dtype=torch.float64))
cell = torch.randint(0, 4, (B, L))  # a property of each token
bonus = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))


def decay_and_bonus(score, b, h, q_idx, kv_idx):
    """Scores decay with the distance, and a learned table adds what the two tokens' cells say."""
    distance = (q_idx - kv_idx).abs()
    return score * torch.exp(-rate[h] * distance / L) + bonus[cell[b, q_idx], cell[b, kv_idx]]


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula: the same function on whole matrices, by broadcasting."""
    b, h = torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(1, -1, 1, 1)
    rows, columns = torch.arange(L).view(1, 1, -1, 1), torch.arange(L).view(1, 1, 1, -1)
    scores = decay_and_bonus(q @ k.transpose(-1, -2) / math.sqrt(E), b, h, rows, columns)
    return torch.softmax(scores.masked_fill(rows < columns, -math.inf), dim=-1) @ v


# float64 inputs are computed in float64: differences are rounding, or mistakes.
mask = anyflex.create_block_mask(masks.causal(), None, None, L, L)
out = anyflex.flex_attention(q, k, v, score_mod=decay_and_bonus, block_mask=mask)
expected_out = dense(q, k, v)
torch.testing.assert_close(out, expected_out)

learned = (q, k, v, rate, bonus)
found = torch.autograd.grad(out.square().sum(), learned)
expected = torch.autograd.grad(expected_out.square().sum(), learned)
for name, one, other in zip(("q", "k", "v", "rate", "bonus"), found, expected, strict=True):
    torch.testing.assert_close(one, other)
    print(f"gradient of {name}: within {(one - other).abs().max():.1e} of the dense formula's")

# A Python `if` on an index can't be traced; the message names the line and the cure.
try:
    anyflex.flex_attention(
        q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score if q_idx > 5 else -score
    )
except anyflex.ModTraceError as error:
    print(f"\nModTraceError: {error}")
else:
    raise AssertionError("a branch was traced")
