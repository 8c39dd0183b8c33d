"""A block mask from runs of blocks, without a function for whole blocks, and its picture."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

import anyflex
from anyflex import BlockMask
from anyflex.plugin import FULL, PARTIAL

torch.manual_seed(0)
H, E, BLOCK, BLOCKS = 2, 32, 32, 6
L = BLOCK * BLOCKS
q, k, v = (torch.randn(1, H, L, E) for _ in range(3))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


# Each row of blocks sees the first block (a sink), its left neighbour, and itself up to now.
offsets, runs = [0], []
for row in range(BLOCKS):
    if row > 1:
        runs.append((0, 1, FULL))
    if row > 0:
        runs.append((row - 1, row, FULL))
    runs.append((row, row + 1, PARTIAL))  # `causal` decides inside of it
    offsets.append(len(runs))

mask = BlockMask.from_runs(
    torch.tensor(offsets, dtype=torch.int32).view(1, 1, -1),
    torch.tensor(runs, dtype=torch.int32),
    seq_lengths=(L, L),
    block_size=BLOCK,
    mask_mod=causal,
)
print(mask.to_string(grid_size=-1))
out = anyflex.flex_attention(q, k, v, block_mask=mask)

with tempfile.TemporaryDirectory() as folder:
    picture = Path(folder, "mask.png")
    mask.plot(picture)
    print(f"{picture.name}: {picture.stat().st_size} bytes")

block = torch.arange(L) // BLOCK
left = block[:, None] - block[None, :]
live = (left == 0) & (torch.arange(L)[:, None] >= torch.arange(L)[None, :])
live |= (left == 1) | ((left > 0) & (block[None, :] == 0))
expected = F.scaled_dot_product_attention(q, k, v, attn_mask=live)
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
print("out is that of the dense mask")
