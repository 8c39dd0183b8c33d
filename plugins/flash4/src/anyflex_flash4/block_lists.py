"""Block mask of a call in FlashAttention-4's form, derived once a mask."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from anyflex.plugin import MaskViews
from anyflex_flash4.bands import Band, follows

__all__ = ["TILE", "Lists", "fits_tiles", "follows_once", "kinds_of", "lists_of"]

TILE = 128
"""Elements of a tile: of keys, in both directions, up to head dim 128; blocks of queries are
multiples of it."""


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
        views = views.in_blocks((TILE, TILE))
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
    return views.once(("anyflex_flash4", band), bool, lambda: follows(views, band))
