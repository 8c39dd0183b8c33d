"""Order in which forward takes a head's tiles: the longest first, by the block mask's rows.

Programs take the next tile when they finish one, so the tail, when most programs have no next
tile, is as long as the last tiles are. Without an order a head's last tiles come first
(`anyflex_triton.forward.tile_of_program`): under causal masks these are the longest, under others
not.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyflex.plugin import MaskViews

__all__ = ["TileOrder", "tile_order"]


class TileOrder(NamedTuple):
    """Order of tiles as the kernels read it, on the mask's device.

    Args:
        tiles: int32 [B', H', tiles], a permutation of each head's tiles, the shortest first. It is
            read backwards, so that the shortest is taken last.
        strides: from one batch entry, and from one head, to the next; 0 where there is only one.
    """

    tiles: Tensor
    strides: tuple[int, int]


class _Kept(NamedTuple):
    """Cache entry of a mask: its order, or None where the tiles are in order as they are."""

    order: TileOrder | None


class _Captured(Exception):
    """A CUDA graph is being captured, which a copy from the host would break."""


def tile_order(views: MaskViews, block_m: int) -> TileOrder | None:
    """Return the order of a mask's tiles, made at its first call and kept with it.

    It is computed on the host, because on the device that would take some 20 small kernels. The
    result is None, which means the last tiles first, where that is the order anyway, as under
    causal masks and windows; where the host has no copy of the mask, because reading the device's
    would synchronize; and while a CUDA graph captures a mask's first call.

    In-place writes to offsets that aren't noticed don't change the cached order. It stays a
    permutation, so that each tile is computed once, whatever its row has become. A graph that has
    captured it needs the mask to stay alive, as it does for offsets and runs.

    Args:
        block_m: query rows of a tile.
    """
    host = views.host
    if host is None:
        return None
    make = partial(_kept, host, block_m, views.device)
    try:
        return views.once(("anyflex_cuda.tile_order", block_m), _Kept, make).order
    except _Captured:
        return None


def _kept(host: MaskViews, block_m: int, device: torch.device) -> _Kept:
    """Compute the cache entry. Raise _Captured instead of copying during a capture."""
    costs = _costs(host, block_m)
    ascending, order = costs.sort(dim=-1, stable=True)
    if torch.equal(ascending, costs):
        return _Kept(None)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise _Captured
    batch, heads, tiles = order.shape
    strides = (heads * tiles if batch > 1 else 0, tiles if heads > 1 else 0)
    # This copy synchronizes, so that calls on other streams, and graphs, may read the order.
    return _Kept(TileOrder(order.to(torch.int32).contiguous().to(device), strides))


def _costs(host: MaskViews, block_m: int) -> Tensor:
    """Return twice the number of key blocks that each tile visits: int64 [B', H', tiles].

    PARTIAL and FULL blocks count alike: mask code costs little beside the products.
    """
    first, end, _ = host.runs.unbind(1)
    until = pad((end - first).cumsum(0), (1, 0))
    of_row = until[host.offsets].diff(dim=-1)
    q_block = host.block_size[0]
    # A tile of Blackwell has two halves, which may belong to two rows of blocks. Those of others
    # count twice.
    begin = torch.arange(0, host.q_length, block_m, device="cpu")
    last = (begin + (block_m - 1)).clamp(max=host.q_length - 1)
    return of_row[..., begin // q_block] + of_row[..., last // q_block]
