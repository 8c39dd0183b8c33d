"""Rows scattered into pages by torch's operations, without a wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.paging.storage import bytes_of, quantised

__all__ = ["append_rows"]


def append_rows(pools: tuple[tuple[Tensor, Tensor | None, Tensor], ...], places: Tensor) -> None:
    """Write rows to their places.

    Args:
        pools: pool [P, Hkv, page, D], its scales [P, Hkv, page] or None, rows [T, Hkv, D].
        places: int64 [T], page * page size + row.
    """
    pages, _, size, _ = pools[0][0].shape
    if places.shape[0] == 0 or pages == 0:
        return
    tokens = places.shape[0]
    live = (places >= 0) & (places < pages * size)
    # A row that is dropped writes what the first live one writes, to the same place: how many
    # are dropped is known on the device alone. If all are, what is there is written again.
    first = live.to(torch.uint8).argmax()
    other = torch.where(live.any(), first, tokens)
    source = torch.where(live, torch.arange(tokens, device=places.device), other)
    place = places[source.clamp(max=tokens - 1)].clamp(0, pages * size - 1)
    page, row = place // size, place % size
    for pool, scales, rows in pools:
        if scales is not None:
            rows, scale = quantised(rows, pool.dtype)
            _put(scales.transpose(1, 2), scale, source, page, row)
        _put(bytes_of(pool).transpose(1, 2), bytes_of(rows), source, page, row)


def _put(by_row: Tensor, rows: Tensor, source: Tensor, page: Tensor, row: Tensor) -> None:
    """Write to a pool that has the page's rows before the heads: rows by their number, or, by the
    number behind the last, what is in the first place."""
    candidates = torch.cat([rows, by_row[page[:1], row[:1]]])
    by_row.index_put_((page, row), candidates.index_select(0, source))
