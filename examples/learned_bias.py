"""T5's learned bias by distance: the table is a parameter, and gets its gradient."""

from __future__ import annotations

import math

import torch
from torch import nn

import anyflex
from anyflex import mods

torch.manual_seed(0)
B, H, L, E = 2, 4, 200, 32
BUCKETS, FAR = 32, 128
table = nn.Parameter(0.1 * torch.randn(BUCKETS, H))
q, k, v = (torch.randn(B, H, L, E) for _ in range(3))

out = anyflex.flex_attention(q, k, v, score_mod=mods.t5_bias(table, max_distance=FAR))
(found,) = torch.autograd.grad(out.square().sum(), table)

# The same in plain torch: T5's buckets, looked up for a matrix of distances.
distance = torch.arange(L)[None, :] - torch.arange(L)[:, None]
half = BUCKETS // 2
near = half // 2
far = (
    near
    + ((distance.abs().clamp(min=1) / near).log() / math.log(FAR / near) * (half - near)).long()
)
bucket = torch.where(distance.abs() < near, distance.abs(), far.clamp(max=half - 1))
bucket = bucket + half * (distance > 0)
bias = table[bucket].permute(2, 0, 1)
expected_out = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(E) + bias, dim=-1) @ v
(expected,) = torch.autograd.grad(expected_out.square().sum(), table)

torch.testing.assert_close(out, expected_out, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
print(f"gradient of the table {tuple(found.shape)}: norm {found.norm():.3f}")

optimizer = torch.optim.SGD([table], lr=1e-2)
for step in range(3):
    loss = anyflex.flex_attention(q, k, v, score_mod=mods.t5_bias(table)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.2f}")
