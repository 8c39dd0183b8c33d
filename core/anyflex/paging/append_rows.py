"""Rows scattered into pages by torch's operations, without a wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.paging.storage import bytes_of, quantised

__all__ = ["Pool", "append_live_rows", "append_rows"]

Pool = tuple[Tensor, Tensor | None, Tensor]
"""Pool [P, Hkv, page, D], its scales [P, Hkv, page] or None, and rows [T, Hkv, D] for it."""


def append_rows(pools: tuple[Pool, ...], page: Tensor, row: Tensor) -> None:
    """Write rows to their places.

    Args:
        page, row: int64 [T], in the pool: a row's page, and its number in it.
    """
    where = page, row
    for pool, scales, rows in pools:
        if scales is not None:
            rows, scale = quantised(rows, pool.dtype)
            scales.transpose(1, 2).index_put_(where, scale)
        bytes_of(pool).transpose(1, 2).index_put_(where, bytes_of(rows))


def append_live_rows(pools: tuple[Pool, ...], places: Tensor) -> None:
    """Write rows to their places, and drop those whose place isn't in the pool.

    Args:
        places: int64 [T], page * page size + row.
    """
    pages, _, size, _ = pools[0][0].shape
    tokens = places.shape[0]
    if tokens == 0 or pages == 0:
        return
    live = (places >= 0) & (places < pages * size)
    # A row that is dropped writes what the first live one writes, to the same place: how many
    # are dropped is known on the device alone. If all are, what is there is written again.
    first = live.to(torch.uint8).argmax()
    other = torch.where(live.any(), first, tokens)
    source = torch.where(live, torch.arange(tokens, device=places.device), other)
    place = places[source.clamp(max=tokens - 1)].clamp(0, pages * size - 1)
    where = place // size, place % size
    for pool, scales, rows in pools:
        if scales is not None:
            rows, scale = quantised(rows, pool.dtype)
            _put(scales.transpose(1, 2), scale, source, where)
        _put(bytes_of(pool).transpose(1, 2), bytes_of(rows), source, where)


def _put(by_row: Tensor, rows: Tensor, source: Tensor, where: tuple[Tensor, Tensor]) -> None:
    """Write to a pool that has the page's rows before the heads: rows by their number, or, by the
    number behind the last, what is in the first place."""
    page, row = where
    candidates = torch.cat([rows, by_row[page[:1], row[:1]]])
    by_row.index_put_(where, candidates.index_select(0, source))
