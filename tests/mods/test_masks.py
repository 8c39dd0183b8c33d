"""Every mask mod at four block sizes, by three ways to make the mask: equal results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

import anyflex
from anyflex.testing.mods import MASK_MODS, SCORE_MODS, Sizes
from anyflex.testing.oracle import dense_attention, dense_mask
from anyflex.testing.results import Forward, Results
from tests.oracles.differences import differences
from tests.oracles.runs import dense_to_runs
from tests.soak import SOAK

__all__: list[str] = []

pytestmark = pytest.mark.usefixtures("float64_numbers")

SIZES = Sizes(2, 2, 1, 70, 150)
BLOCK_SIZES = ((16, 16), (64, 64), (128, 128), (32, 128))


@pytest.mark.parametrize("name", list(MASK_MODS)[:: 1 if SOAK else 2])
def test_a_mask_mod(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    entry = MASK_MODS[name]
    mask_mod = entry.make(SIZES, generator).function()
    score_mod = SCORE_MODS["alibi_abs"].make(SIZES, generator, torch.float64).function()
    query = torch.randn((2, 2, 70, 4), generator=generator)
    key, value = (torch.randn((2, 2, 150, 4), generator=generator) for _ in "kv")
    sizes = (2 if entry.batched else 1, 2 if entry.headed else 1, 70, 150)
    live = dense_mask(mask_mod, *sizes)
    assert torch.equal(anyflex.create_mask(mask_mod, *sizes), live)
    wanted = Results(Forward(dense_attention(query, key, value, score_mod, live).out))

    for block_size in BLOCK_SIZES:
        built = anyflex.create_block_mask(mask_mod, *sizes, BLOCK_SIZE=block_size)
        offsets, runs = dense_to_runs(live, block_size)
        given = anyflex.BlockMask.from_runs(
            offsets, runs, seq_lengths=(70, 150), block_size=block_size, mask_mod=mask_mod
        )
        assert torch.equal(built.offsets.expand_as(offsets), offsets)
        assert torch.equal(built.runs[: len(runs)], runs)
        theirs = torch_flex.create_block_mask(
            mask_mod, *sizes, device="cpu", BLOCK_SIZE=block_size
        )
        for mask in (built, given, anyflex.BlockMask.from_torch(theirs)):
            out = anyflex.flex_attention(query, key, value, score_mod, mask)
            assert differences(Results(Forward(out)), wanted, tolerance=1e-12) == []
