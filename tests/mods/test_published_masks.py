"""Mask mods of published collections can be written, and mean what their plain Python says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import anyflex
from anyflex.testing.oracle import dense_attention
from tests.mods.published_masks import LENGTH, PUBLISHED_MASKS, TOP_BLOCKS, TOP_K_BLOCK
from tests.oracles.runs import dense_to_runs

__all__: list[str] = []

NAMES = (
    "causal sliding global_sliding dilated prefix_lm document batchify batch shared_prefix "
    "block_diffusion flamingo natten sta svg vsa searched_documents near_in_space jetspec"
)
CASES = [
    pytest.param(*case, id=f"{name}-{i}")
    for name, cases in PUBLISHED_MASKS.items()
    for i, case in enumerate(cases)
]


def test_the_collection_is_complete() -> None:
    assert list(PUBLISHED_MASKS) == NAMES.split()


@pytest.mark.parametrize(("mask_mod", "meaning"), CASES)
def test_a_published_mask(mask_mod: Callable[..., Any], meaning: Callable[..., bool]) -> None:
    sizes = (2, 2, LENGTH, LENGTH)
    live = torch.tensor(
        [
            [[[meaning(b, h, q, k) for k in range(LENGTH)] for q in range(LENGTH)] for h in (0, 1)]
            for b in (0, 1)
        ]
    )
    assert live.any() and not live.all()
    assert torch.equal(anyflex.create_mask(mask_mod, *sizes), live)
    block_mask = anyflex.create_block_mask(mask_mod, *sizes, BLOCK_SIZE=16)
    # One batch or head stands for all where the mask doesn't depend on it.
    batch, heads, _ = block_mask.offsets.shape
    offsets, runs = dense_to_runs(live[:batch, :heads], (16, 16))
    assert torch.equal(live[:batch, :heads].expand_as(live), live)
    assert torch.equal(block_mask.offsets, offsets)
    assert torch.equal(block_mask.runs[: len(runs)], runs)

    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn((2, 2, LENGTH, 4), generator=generator) for _ in range(3))
    out = anyflex.flex_attention(query, key, value, block_mask=block_mask)
    wanted = dense_attention(query.double(), key.double(), value.double(), mask=live).out
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)


def test_blocks_chosen_outside_may_be_given_as_runs() -> None:
    mask_mod = PUBLISHED_MASKS["vsa"][0][0]
    dense = TOP_BLOCKS[None].repeat_interleave(TOP_K_BLOCK, 2).repeat_interleave(TOP_K_BLOCK, 3)
    offsets, runs = dense_to_runs(dense, (TOP_K_BLOCK, TOP_K_BLOCK))
    given = anyflex.BlockMask.from_runs(
        offsets, runs, seq_lengths=(LENGTH, LENGTH), block_size=(TOP_K_BLOCK, TOP_K_BLOCK)
    )
    built = anyflex.create_block_mask(mask_mod, 1, 2, LENGTH, LENGTH, BLOCK_SIZE=TOP_K_BLOCK)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn((1, 2, LENGTH, 4), generator=generator) for _ in range(3))
    assert torch.equal(
        anyflex.flex_attention(query, key, value, block_mask=given),
        anyflex.flex_attention(query, key, value, block_mask=built),
    )
