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
    live = (places >= 0) & (places < pages * size)
    # A row that is dropped writes what the first live one writes, to the same place: how many
    # are dropped is known on the device alone. If all are, what is there is written again.
    first = live.to(torch.uint8).argmax()
    source = torch.where(live, torch.arange(places.shape[0], device=places.device), first)
    place = places[source].clamp(0, pages * size - 1)
    page, row, written = place // size, place % size, live.any()
    for pool, scales, rows in pools:
        if scales is not None:
            rows, scale = quantised(rows, pool.dtype)
            _put(scales.transpose(1, 2), scale[source], page, row, written)
        _put(bytes_of(pool).transpose(1, 2), bytes_of(rows)[source], page, row, written)


def _put(by_row: Tensor, rows: Tensor, page: Tensor, row: Tensor, written: Tensor) -> None:
    """Write rows to a pool that has the page's rows before the heads, if `written`."""
    before = by_row[page[:1], row[:1]]
    by_row.index_put_((page, row), torch.where(written, rows, before))
