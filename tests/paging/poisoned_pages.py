"""NaN in all rows of a cache's pages that no sequence holds."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.paging.cache import PagedKVCache

__all__ = ["places", "poison"]


def places(cache: PagedKVCache, slot: int, length: int) -> tuple[Tensor, Tensor]:
    """Page and row of each token, from the table that kernels read."""
    position, size = torch.arange(length), cache.key.shape[3]
    return cache.page_table[slot, position // size].long(), position % size


def poison(cache: PagedKVCache, lengths: dict[int, int]) -> None:
    """Fill all that is no row of a sequence with NaN, and the table's dead entries with ids of no
    page."""
    pages, size = cache.key.shape[1], cache.key.shape[3]
    stale = torch.ones(pages, size, dtype=torch.bool)
    for slot, length in lengths.items():
        stale[places(cache, slot, length)] = False
        cache.page_table[slot, -(-length // size) :] = 2**31 - 1
    stale[list(cache._sequences.owners._key_of)] = False  # `prefix` may find those
    # An int8 has no NaN; its scale has.
    plain = cache.key_scale is None
    for pool in (cache.key, cache.value) if plain else (cache.key_scale, cache.value_scale):
        assert pool is not None
        pool.transpose(2, 3)[:, stale] = torch.nan
