"""Block mask of a call as torch's BlockMask."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from anyflex.plugin import FULL, PARTIAL, MaskViews

__all__ = ["one_block", "torch_block_mask"]

MaskMod = Callable[..., Any]


def torch_block_mask(
    views: MaskViews, mask_mod: MaskMod | None, block_multiple: int = 1
) -> BlockMask:
    """Return torch's form of `views`, on their device, with a mask function of its own.

    The structure, and its transposed form for backward, is made once for a mask and kept with the
    views. torch's own `BlockMask.from_kv_blocks` uses vmap, which does not work inside of an
    operator.

    Args:
        mask_mod: what PARTIAL blocks apply, or None.
        block_multiple: blocks become multiples of this; the structure of smaller ones becomes part
            of the mask function.
    """
    q_block, kv_block = (math.lcm(size, block_multiple) for size in views.block_size)
    larger = views.in_blocks((q_block, kv_block))
    structure = larger.once("anyflex_torch_flex", BlockMask, lambda: _without_mod(larger))
    if larger is not views:
        mask_mod = _within_structure(views, mask_mod)
    # Without a mask function torch keeps every pair, which is the meaning of PARTIAL then.
    mask = copy.copy(structure)
    if mask_mod is not None:
        mask.mask_mod = mask_mod
    return mask


def one_block(device: torch.device) -> BlockMask:
    """Return the mask that torch makes where it is given none: one block of any length.

    torch makes it by vmap, which does not work inside of an operator.
    """
    count = torch.ones((1, 1, 1), dtype=torch.int32, device=device)
    indices = torch.zeros((1, 1, 1, 1), dtype=torch.int32, device=device)
    return BlockMask(
        seq_lengths=(1, 1),
        kv_num_blocks=count,
        kv_indices=indices,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=count,
        q_indices=indices,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(1 << 30, 1 << 30),
        mask_mod=noop_mask,
    )


def _without_mod(views: MaskViews) -> BlockMask:
    rows, columns = views.index_lists(), views.transposed().index_lists()
    return BlockMask(
        seq_lengths=(views.q_length, views.kv_length),
        kv_num_blocks=rows.kv_num_blocks,
        kv_indices=rows.kv_indices,
        full_kv_num_blocks=rows.full_kv_num_blocks,
        full_kv_indices=rows.full_kv_indices,
        q_num_blocks=columns.kv_num_blocks,
        q_indices=columns.kv_indices,
        full_q_num_blocks=columns.full_kv_num_blocks,
        full_q_indices=columns.full_kv_indices,
        BLOCK_SIZE=views.block_size,
        mask_mod=noop_mask,
    )


def _within_structure(views: MaskViews, mask_mod: MaskMod | None) -> MaskMod:
    """A mask function that reads the small blocks first: structure wins."""
    kinds = views.dense()
    q_block, kv_block = views.block_size
    # 0 where the mask serves all batches, or heads, alike.
    each_batch, each_head = (int(size > 1) for size in kinds.shape[:2])

    def within(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        kind = kinds[b * each_batch, h * each_head, q_idx // q_block, kv_idx // kv_block]
        if mask_mod is None:
            return kind != 0
        kept: Tensor = (kind == FULL) | ((kind == PARTIAL) & mask_mod(b, h, q_idx, kv_idx))
        return kept

    return within
