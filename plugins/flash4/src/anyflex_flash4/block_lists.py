"""Block mask of a call in FlashAttention-4's form, derived once a mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyflex.plugin import FULL, MaskViews
from anyflex_flash4.bands import Band, follows

__all__ = ["TILE", "Lists", "fits_tiles", "follows_once", "kinds_of", "lists_of"]

TILE = 128
"""Elements of a tile: of keys, in both directions, up to head dim 128; blocks of queries are
multiples of it."""
_KEPT = "anyflex_flash4"


@dataclass(frozen=True)
class Lists:
    """Arguments of FlashAttention-4's BlockSparseTensorsTorch.

    Args:
        mask_block_cnt, mask_block_idx: of PARTIAL blocks, int32 [B', H', rows] and
            [B', H', rows, columns].
        full_block_cnt, full_block_idx: of FULL blocks.
        block_size: (q, kv), in either direction.
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


def fits_tiles(block_size: tuple[int, int]) -> bool:
    """Whether FlashAttention-4's kernels can walk a mask's blocks unchanged."""
    return block_size[1] == TILE and block_size[0] % TILE == 0


def lists_of(views: MaskViews, *, backward: bool = False) -> Lists:
    """Return a mask's lists: the kv blocks of each q block, for backward the other way round.

    Blocks of other sizes become tiles: FULL where all of a tile is, else PARTIAL, and then
    `kinds_of` says which blocks in it are visited.
    """
    if not fits_tiles(views.block_size):
        forward, transposed = _kept(views, "tiles", lambda: _tile_lists(views))
        found: Lists = transposed if backward else forward
        return found
    lists = (views.transposed() if backward else views).index_lists()
    return Lists(
        lists.kv_num_blocks,
        lists.kv_indices,
        lists.full_kv_num_blocks,
        lists.full_kv_indices,
        views.block_size,
    )


def kinds_of(views: MaskViews) -> tuple[Tensor, tuple[int, int, int, int]]:
    """Return the kinds of a mask's own blocks, int8 and flat, and their layout: strides of batch
    and head, 0 where one serves all, then the number of rows and of columns."""
    kinds = views.dense()
    batches, heads, rows, columns = kinds.shape
    head = rows * columns if heads > 1 else 0
    batch = heads * rows * columns if batches > 1 else 0
    return kinds.reshape(-1), (batch, head, rows, columns)


def follows_once(views: MaskViews, band: Band) -> bool:
    """`follows`, evaluated once a mask."""
    return bool(_kept(views, band, lambda: follows(views, band)))


def _kept(views: MaskViews, name: object, make: Any) -> Any:
    """Derived forms, made once a mask and kept on a tensor of the views."""
    made: dict[object, Any] | None = getattr(views.offsets, _KEPT, None)
    if made is None:
        made = {}
        setattr(views.offsets, _KEPT, made)
    if name not in made:
        made[name] = make()
    return made[name]


def _tiles(views: MaskViews) -> tuple[Tensor, Tensor]:
    """(PARTIAL, FULL) of each tile, bool [B', H', q tiles, kv tiles]."""
    kinds = views.dense()
    some, lacking = kinds != 0, kinds != FULL
    for axis, (block, length) in enumerate(
        zip(views.block_size, (views.q_length, views.kv_length), strict=True), start=2
    ):
        some, lacking = (_any_in_tiles(each, axis, block, length) for each in (some, lacking))
    return some & lacking, ~lacking


def _any_in_tiles(blocks: Tensor, axis: int, block: int, length: int) -> Tensor:
    """Whether any block that a tile touches is True, along one axis."""
    first = torch.arange(-(-length // TILE), device=blocks.device) * TILE
    end = (first + TILE).clamp(max=length)
    sums = blocks.to(torch.int32).cumsum(axis)
    sums = torch.cat([torch.zeros_like(sums.narrow(axis, 0, 1)), sums], axis)
    after = sums.index_select(axis, (end + block - 1) // block)
    return after > sums.index_select(axis, first // block)


def _tile_lists(views: MaskViews) -> tuple[Lists, Lists]:
    """Lists of tiles for forward, and for backward."""
    partial, full = _tiles(views)
    forward = Lists(*_listed(partial), *_listed(full), (TILE, TILE))
    return forward, Lists(*_listed(partial.mT), *_listed(full.mT), (TILE, TILE))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Bool [B', H', rows, columns] as counts and indices, those that are True first."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    # Sorting a transposed tensor gives a transposed one, and `contiguous` leaves the stride of a
    # single column unchanged: FlashAttention-4 refuses both.
    indices = torch.empty(blocks.shape, dtype=torch.int32, device=blocks.device).copy_(order)
    return blocks.sum(-1, dtype=torch.int32), indices
