"""Writes to a paged cache: each token in its slot, in every layout, and nothing else changed."""

from __future__ import annotations

import itertools

import pytest
import torch
from anyflex_vllm.cache import write_cache

BLOCKS, HEADS, BLOCK, SIZES = 5, 2, 4, (3, 2)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_each_token_is_written_to_its_slot_and_nothing_else(order: tuple[int, int, int]) -> None:
    shape = [BLOCKS, HEADS, BLOCK]
    storage = torch.full([*(shape[axis] for axis in order), sum(SIZES)], torch.nan)
    cache = storage.permute(*(order.index(axis) for axis in range(3)), 3)
    key, value = (torch.randn(6, HEADS, size) for size in SIZES)
    slots = [17, 4, 5, 11, 8]
    write_cache(cache, key, value, torch.tensor(slots))
    for block, row in itertools.product(range(BLOCKS), range(BLOCK)):
        found = cache[block, :, row]
        if (slot := block * BLOCK + row) in slots:
            token = slots.index(slot)
            assert torch.equal(found, torch.cat([key[token], value[token]], -1))
        else:
            assert found.isnan().all()


def test_padding_reaches_block_0_alone_as_zeros() -> None:
    cache = torch.full((BLOCKS, HEADS, BLOCK, 4), 7.0)
    rows = torch.full((3, HEADS, 2), torch.nan)
    rows[1] = 1.0
    write_cache(cache, rows, rows, torch.tensor([-1, 9, -1]))
    assert (cache[2, :, 1] == 1).all() and (cache[0, :, 0] == 0).all()
    cache[2, :, 1] = cache[0, :, 0] = 7.0
    assert (cache == 7).all()
