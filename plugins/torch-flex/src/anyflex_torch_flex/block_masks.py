"""A call's block mask as torch's BlockMask."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.nn.attention.flex_attention import BlockMask

from anyflex.plugin import MaskViews

__all__ = ["torch_block_mask"]

_KEPT = "anyflex_torch_flex_block_mask"


def torch_block_mask(views: MaskViews, mask_mod: Callable[..., Any] | None) -> BlockMask:
    """Return torch's form of `views`, on their device, with a mask function of its own.

    The structure, and its transposed form for backward, is made once for a mask: it hangs on the
    tensor of block indices, which the views keep.
    """
    lists = views.index_lists()
    structure = getattr(lists.kv_indices, _KEPT, None)
    if structure is None:
        structure = BlockMask.from_kv_blocks(
            lists.kv_num_blocks,
            lists.kv_indices,
            lists.full_kv_num_blocks,
            lists.full_kv_indices,
            BLOCK_SIZE=views.block_size,
            seq_lengths=(views.q_length, views.kv_length),
        )
        setattr(lists.kv_indices, _KEPT, structure)
    # Without a mask function torch has one that keeps every pair, which is what PARTIAL means
    # then.
    mask = copy.copy(structure)
    if mask_mod is not None:
        mask.mask_mod = mask_mod
    return mask
