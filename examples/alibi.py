"""ALiBi: a penalty that grows with the distance, written by hand and ready-made."""

from __future__ import annotations

import math

import torch

import anyflex
from anyflex import masks, mods

torch.manual_seed(0)
B, H, L, E = 1, 8, 256, 32
q, k, v = (torch.randn(B, H, L, E) for _ in range(3))
mask = anyflex.create_block_mask(masks.causal(), None, None, L, L)

slopes = 2.0 ** -torch.arange(1.0, H + 1)  # one a head


def alibi(score, b, h, q_idx, kv_idx):
    return score - slopes[h] * (q_idx - kv_idx)


by_hand = anyflex.flex_attention(q, k, v, score_mod=alibi, block_mask=mask)
ready_made = anyflex.flex_attention(q, k, v, score_mod=mods.alibi(H), block_mask=mask)
torch.testing.assert_close(ready_made, by_hand)

distance = torch.arange(L)[:, None] - torch.arange(L)[None, :]
scores = q @ k.transpose(-1, -2) / math.sqrt(E) - slopes[:, None, None] * distance
expected = torch.softmax(scores.masked_fill(distance < 0, -math.inf), dim=-1) @ v
torch.testing.assert_close(by_hand, expected, rtol=1e-4, atol=1e-5)
print("slopes:", ", ".join(f"{slope:g}" for slope in slopes.tolist()))
print(f"largest difference from the dense formula: {(by_hand - expected).abs().max():.1e}")
