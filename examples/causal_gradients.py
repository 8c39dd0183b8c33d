"""Causal attention of a language model, forward and backward, compared with torch's own."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import anyflex

torch.manual_seed(0)
B, H, L, E = 2, 4, 256, 32
q, k, v = (torch.randn(B, H, L, E, requires_grad=True) for _ in range(3))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


# Build the mask once and use it in every layer: None stands for all batch entries and heads.
mask = anyflex.create_block_mask(causal, None, None, L, L)
print(mask)

out = anyflex.flex_attention(q, k, v, block_mask=mask)
found = torch.autograd.grad(out.square().sum(), (q, k, v))

expected_out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
expected = torch.autograd.grad(expected_out.square().sum(), (q, k, v))

torch.testing.assert_close(out, expected_out, rtol=1e-4, atol=1e-5)
for name, one, other in zip("qkv", found, expected, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    print(f"gradient of {name}: within {(one - other).abs().max():.1e} of torch's")
