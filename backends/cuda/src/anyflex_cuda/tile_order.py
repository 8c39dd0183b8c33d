"""In which order the tiles of a head are taken: the longest first, by the rows of the block mask.

Programs take the next tile when they are done with one, so that what is left at the end is as long
as the last tiles are. Where no mask is ordered, the last rows come first, which under causal masks
are the longest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from triton.runtime import driver

from anyflex.plugin import Call, MaskViews

__all__ = ["NO_ORDER", "TileOrder", "tile_order"]


class TileOrder(NamedTuple):
    """What the producer reads.

    Args:
        tiles: int32 [B', H', tiles], a head's tiles in the order in which they are taken; or None,
            the last first.
        strides: from one batch entry of it, and from one head, to the next; 0 where there is one.
    """

    tiles: Tensor | None
    strides: tuple[int, int]


NO_ORDER = TileOrder(None, (0, 0))


class _Kept:
    """An order, and which calls may read it: those on the stream that it was made on, and others
    behind its event.

    Args:
        order: made just now, on the current stream of its device.
    """

    __slots__ = ("order", "pending", "stream")

    def __init__(self, order: TileOrder) -> None:
        self.order = order
        self.stream = self.pending = None
        tiles = order.tiles
        if tiles is not None and tiles.is_cuda:
            self.stream = driver.active.get_current_stream(tiles.device.index)
            self.pending = torch.cuda.Event()
            self.pending.record(torch.cuda.current_stream(tiles.device))

    def here(self) -> TileOrder:
        """The order for a call on the current stream, or none where a graph that is captured
        would have to wait for it."""
        tiles = self.order.tiles
        if self.stream is None or tiles is None:
            return self.order
        alone = driver.active.get_current_stream(tiles.device.index) == self.stream
        if alone and self.pending is None:
            return self.order
        if torch.cuda.is_current_stream_capturing():
            # To ask for an event, or wait for one of before, would end the capture.
            return NO_ORDER if self.pending is not None else self.order
        pending = self.pending
        if pending is not None and pending.query():
            self.pending = pending = None
        if not alone:
            stream = torch.cuda.current_stream(tiles.device)
            if pending is not None:
                stream.wait_event(pending)
            # Its memory may go with the mask, and be another tensor's on the stream of before.
            tiles.record_stream(stream)
        return self.order


def tile_order(call: Call, block_m: int, tiles: int) -> TileOrder:
    """Return the order for a call with a mask, made once a mask, on the device alone.

    A CUDA graph that captures a mask's first call gets none: what is made in it is no other
    call's.

    Args:
        block_m: query rows of a tile, of which the mask's blocks are multiples.
        tiles: of a head.
    """
    views = call.mask
    if views is None or not views.offsets.is_contiguous():  # may be written again in place
        return NO_ORDER
    kept = views.once("anyflex_cuda.tile_order", dict, dict)
    found: _Kept | None = kept.get((block_m, tiles))
    if found is not None:
        return found.here()
    if views.offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        return NO_ORDER
    found = kept[block_m, tiles] = _Kept(_made(views, block_m, tiles))
    return found.order


def _made(views: MaskViews, block_m: int, tiles: int) -> TileOrder:
    blocks = views.runs[:, 1] - views.runs[:, 0]
    until = pad(blocks.cumsum(0), (1, 0))
    costs = until[views.offsets].diff(dim=-1)
    costs = costs.repeat_interleave(views.block_size[0] // block_m, dim=-1)[..., :tiles]
    # Of equally long ones the last first.
    order = tiles - 1 - costs.flip(-1).argsort(dim=-1, descending=True, stable=True)
    batch, heads, _ = order.shape
    strides = (heads * tiles if batch > 1 else 0, tiles if heads > 1 else 0)
    return TileOrder(order.to(torch.int32).contiguous(), strides)
