"""A call's block mask as FlashAttention-4 takes it, derived once a mask."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from anyflex.plugin import MaskViews
from anyflex_flash4.bands import Band, follows

__all__ = ["Lists", "follows_once", "lists_of"]

_KEPT = "anyflex_flash4_follows"


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


def lists_of(views: MaskViews, *, backward: bool = False) -> Lists:
    """Return a mask's lists: the kv blocks of each q block, for backward the other way round."""
    lists = (views.transposed() if backward else views).index_lists()
    return Lists(
        lists.kv_num_blocks,
        lists.kv_indices,
        lists.full_kv_num_blocks,
        lists.full_kv_indices,
        views.block_size,
    )


def follows_once(views: MaskViews, band: Band) -> bool:
    """`follows`, looked at once a mask: the answer hangs on a tensor that the views keep."""
    answers: dict[Band, bool] | None = getattr(views.offsets, _KEPT, None)
    if answers is None:
        answers = {}
        setattr(views.offsets, _KEPT, answers)
    if band not in answers:
        answers[band] = follows(views, band)
    return answers[band]
