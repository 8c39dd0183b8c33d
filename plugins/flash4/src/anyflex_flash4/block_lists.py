"""Block mask of a call in FlashAttention-4's form, derived once a mask."""

from __future__ import annotations

from torch import Tensor

from anyflex.plugin import MaskViews
from anyflex_flash4.bands import Band, follows

__all__ = ["TILE", "fits_tiles", "follows_once", "kinds_of", "lists_of"]

TILE = 128
"""Elements of a tile: of keys, in both directions, up to head dim 128; blocks of queries are
multiples of it."""


def fits_tiles(block_size: tuple[int, int]) -> bool:
    """Whether FlashAttention-4's kernels can walk a mask's blocks unchanged."""
    return block_size[1] == TILE and block_size[0] % TILE == 0


def lists_of(views: MaskViews, *, backward: bool = False) -> dict[str, object]:
    """Return the arguments of FlashAttention-4's BlockSparseTensorsTorch: the kv blocks of each q
    block, for backward the other way round. ``block_size`` is (q, kv) in either direction.

    Blocks of other sizes become tiles: FULL where all of a tile is, else PARTIAL, and then
    `kinds_of` says which blocks in it are visited.
    """
    if not fits_tiles(views.block_size):
        views = views.in_blocks((TILE, TILE))
    lists = (views.transposed() if backward else views).index_lists()
    return {
        "mask_block_cnt": lists.kv_num_blocks,
        "mask_block_idx": lists.kv_indices,
        "full_block_cnt": lists.full_kv_num_blocks,
        "full_block_idx": lists.full_kv_indices,
        "block_size": views.block_size,
    }


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
