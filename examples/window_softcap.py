"""A sliding window with capped scores, as in Gemma 2: a ready-made mask and a ready-made mod."""

from __future__ import annotations

import math

import torch

import anyflex
from anyflex import masks, mods

torch.manual_seed(0)
B, H, L, E = 1, 4, 512, 32
WINDOW, CAP = 64, 20.0
q, k, v = (torch.randn(B, H, L, E, requires_grad=True) for _ in range(3))

mask = anyflex.create_block_mask(masks.causal_window(WINDOW), None, None, L, L, BLOCK_SIZE=64)
out = anyflex.flex_attention(q, k, v, score_mod=mods.softcap(CAP), block_mask=mask)
found = torch.autograd.grad(out.square().sum(), (q, k, v))
print(f"{mask.sparsity():.0f} % of the blocks are never visited")

# The same in plain torch: a matrix of scores, and a matrix that says which of them count.
scores = q @ k.transpose(-1, -2) / math.sqrt(E)
scores = CAP * torch.tanh(scores / CAP)
distance = torch.arange(L)[:, None] - torch.arange(L)[None, :]
live = (distance >= 0) & (distance < WINDOW)
expected_out = torch.softmax(scores.masked_fill(~live, -math.inf), dim=-1) @ v
expected = torch.autograd.grad(expected_out.square().sum(), (q, k, v))

torch.testing.assert_close(out, expected_out, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
print("out and gradients are those of the dense formula")
