"""Documents packed into one row: no position sees another document."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import anyflex
from anyflex import and_masks, masks

torch.manual_seed(0)
H, E = 4, 32
LENGTHS = [100, 37, 163, 12, 200]
L = sum(LENGTHS)
q, k, v = (torch.randn(1, H, L, E, requires_grad=True) for _ in range(3))

document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
packed = and_masks(masks.causal(), masks.document(document))
mask = anyflex.create_block_mask(packed, None, None, L, L, BLOCK_SIZE=32)
print(mask.to_string())

out = anyflex.flex_attention(q, k, v, block_mask=mask)
found = torch.autograd.grad(out.square().sum(), (q, k, v))

# Each document alone, with causal attention of its own, gives the same numbers.
parts = zip(*(each.split(LENGTHS, dim=2) for each in (q, k, v)), strict=True)
alone = [F.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
expected_out = torch.cat(alone, dim=2)
expected = torch.autograd.grad(expected_out.square().sum(), (q, k, v))

torch.testing.assert_close(out, expected_out, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
print(f"{len(LENGTHS)} documents in one row: as if each had been computed alone")
