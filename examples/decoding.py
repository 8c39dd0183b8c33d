"""Decoding with a cache of keys: one query a step, grouped heads, and the row's lse."""

from __future__ import annotations

import math

import torch

import anyflex
from anyflex import masks

torch.manual_seed(0)
B, HQ, HKV, E, CAPACITY = 2, 8, 2, 32, 64
keys = torch.zeros(B, HKV, CAPACITY, E)
values = torch.zeros(B, HKV, CAPACITY, E)
seen = torch.tensor([5, 40])  # each sequence has another number of keys already
for sequence, count in enumerate(seen.tolist()):
    keys[sequence, :, :count] = torch.randn(HKV, count, E)
    values[sequence, :, :count] = torch.randn(HKV, count, E)

for step in range(4):
    q = torch.randn(B, HQ, 1, E)
    rows = torch.arange(B)
    keys[rows, :, seen] = torch.randn(B, HKV, E)
    values[rows, :, seen] = torch.randn(B, HKV, E)

    # The query's place among the keys is its offset; what lies behind it is not read.
    mask = anyflex.create_block_mask(masks.causal(offset=seen), B, None, 1, CAPACITY)
    out, aux = anyflex.flex_attention(
        q,
        keys,
        values,
        block_mask=mask,
        enable_gqa=True,
        return_aux=anyflex.AuxRequest(lse=True, max_scores=True),
    )

    scores = q @ keys.repeat_interleave(HQ // HKV, dim=1).transpose(-1, -2) / math.sqrt(E)
    live = torch.arange(CAPACITY) <= seen[:, None, None, None]
    scores = scores.masked_fill(~live, -math.inf)
    expected = torch.softmax(scores, dim=-1) @ values.repeat_interleave(HQ // HKV, dim=1)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(aux.lse, scores.logsumexp(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(aux.max_scores, scores.amax(-1), rtol=1e-4, atol=1e-5)

    seen = seen + 1
    print(f"step {step}: {seen.tolist()} keys, lse of the first head {aux.lse[:, 0, 0].tolist()}")
