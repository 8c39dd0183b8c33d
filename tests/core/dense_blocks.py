"""Oracle for block masks: the dense mask by torch's vmap, cut into blocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from anyflex.block_mask.block_mask import BlockMask

__all__ = ["block_kinds", "dense_mask", "random_case", "written_kinds"]


def dense_mask(mod: Callable[..., Any], batch: int, heads: int, q: int, kv: int) -> Tensor:
    """bool [batch, heads, q, kv], without any code of the project."""
    if not (batch and heads and q and kv):
        return torch.zeros(batch, heads, q, kv, dtype=torch.bool)
    return torch_flex.create_mask(mod, batch, heads, q, kv, device="cpu")


def block_kinds(live: Tensor, block: tuple[int, int]) -> Tensor:
    """int8 [batch, heads, Qb, Kb]: 1 where all elements in range are live, 2 where some are."""
    batch, heads, q, kv = live.shape
    rows, columns = -(-q // block[0]), -(-kv // block[1])

    def cut(fill: bool) -> Tensor:
        padded = torch.full((batch, heads, rows * block[0], columns * block[1]), fill)
        padded[:, :, :q, :kv] = live
        return padded.view(batch, heads, rows, block[0], columns, block[1])

    some, every = cut(False).any(5).any(3), cut(True).all(5).all(3)
    return torch.where(every, 1, torch.where(some, 2, 0)).to(torch.int8)


def written_kinds(offsets: Tensor, runs: Tensor, columns: int) -> Tensor:
    """The same grid read off a run list, one run at a time; asserts that it is canonical."""
    batch, heads, edges = offsets.shape
    grid = torch.zeros(batch, heads, edges - 1, columns, dtype=torch.int8)
    expected = 0
    for b in range(batch):
        for h in range(heads):
            for row in range(edges - 1):
                begin, end = int(offsets[b, h, row]), int(offsets[b, h, row + 1])
                assert begin == expected <= end
                expected = end
                before, before_kind = 0, 0
                for first, last, kind in runs[begin:end].tolist():
                    assert before <= first < last <= columns and kind in (1, 2)
                    assert before < first or kind != before_kind or before == 0
                    grid[b, h, row, first:last] = kind
                    before, before_kind = last, kind
    assert expected <= len(runs)
    return grid


def random_case(rng: random.Random) -> tuple[int, int, tuple[int, int]]:
    """(q length, kv length, block size)."""
    q = rng.randint(1, 300)
    kv = q if rng.random() < 0.3 else rng.randint(1, 300)
    sizes = (16, 32, 48, 64, 100, 128)
    q_block = rng.choice(sizes)
    return q, kv, (q_block, q_block if rng.random() < 0.5 else rng.choice(sizes))


def check_kinds(mask: BlockMask, kinds: Tensor) -> None:
    """Assert that the mask's runs, and its views, say `kinds` [B, H, Qb, Kb]."""
    views = mask.views()
    written = written_kinds(mask.offsets, mask.runs, kinds.shape[3])
    assert torch.equal(written.expand_as(kinds), kinds)
    rows = views.q_blocks
    assert torch.equal(views.kind_rows(0, rows), written)
    middle = rows // 2
    assert torch.equal(views.kind_rows(middle, rows), written[:, :, middle:])
    across = views.transposed()
    turned = written_kinds(across.offsets, across.runs, rows)
    assert torch.equal(turned.transpose(2, 3), written)
    assert torch.equal(across.kind_rows(0, across.q_blocks), turned)
