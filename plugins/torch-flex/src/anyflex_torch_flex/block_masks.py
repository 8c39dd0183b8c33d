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

__all__ = ["torch_block_mask"]

_KEPT = "anyflex_torch_flex_block_mask"

MaskMod = Callable[..., Any]
Lists = tuple[Tensor, Tensor]


def torch_block_mask(
    views: MaskViews, mask_mod: MaskMod | None, block_multiple: int = 1
) -> BlockMask:
    """Return torch's form of `views`, on their device, with a mask function of its own.

    The structure, and its transposed form for backward, is made once for a mask and kept on a
    tensor of the views. torch's own `BlockMask.from_kv_blocks` uses vmap, which does not work
    inside of an operator.

    Args:
        mask_mod: what PARTIAL blocks apply, or None.
        block_multiple: blocks become multiples of this; the structure of smaller ones becomes part
            of the mask function.
    """
    fits = all(size % block_multiple == 0 for size in views.block_size)
    holder = views.index_lists().kv_indices if fits else views.dense()
    structure = getattr(holder, _KEPT, None)
    if structure is None:
        structure = _same_blocks(views) if fits else _larger_blocks(views, block_multiple)
        setattr(holder, _KEPT, structure)
    if not fits:
        mask_mod = _within_structure(views, mask_mod)
    # Without a mask function torch keeps every pair, which is the meaning of PARTIAL then.
    mask: BlockMask = copy.copy(structure)
    if mask_mod is not None:
        mask.mask_mod = mask_mod
    return mask


def _same_blocks(views: MaskViews) -> BlockMask:
    rows, columns = views.index_lists(), views.transposed().index_lists()
    return _torch_mask(
        views,
        views.block_size,
        (rows.kv_num_blocks, rows.kv_indices),
        (rows.full_kv_num_blocks, rows.full_kv_indices),
        (columns.kv_num_blocks, columns.kv_indices),
        (columns.full_kv_num_blocks, columns.full_kv_indices),
    )


def _larger_blocks(views: MaskViews, multiple: int) -> BlockMask:
    """Blocks of the least common multiple: FULL where all of its small ones are."""
    sizes = [math.lcm(size, multiple) for size in views.block_size]
    rows, columns = (size // old for size, old in zip(sizes, views.block_size, strict=True))
    kinds = views.dense()
    # Blocks past the lengths are neither missing nor partial.
    spare_rows, spare_columns = -kinds.shape[2] % rows, -kinds.shape[3] % columns
    pad = (0, spare_columns, 0, spare_rows)
    visited = torch.nn.functional.pad(kinds != 0, pad, value=False)
    whole = torch.nn.functional.pad(kinds == FULL, pad, value=True)
    shape = (*kinds.shape[:2], visited.shape[2] // rows, rows, -1, columns)
    some, every = visited.view(shape).any(5).any(3), whole.view(shape).all(5).all(3)
    partial, full = some & ~every, some & every
    lists = [_listed(blocks) for blocks in (partial, full, partial.mT, full.mT)]
    return _torch_mask(views, (sizes[0], sizes[1]), *lists)


def _torch_mask(
    views: MaskViews,
    block_size: tuple[int, int],
    partial: Lists,
    full: Lists,
    partial_columns: Lists,
    full_columns: Lists,
) -> BlockMask:
    return BlockMask(
        seq_lengths=(views.q_length, views.kv_length),
        kv_num_blocks=partial[0],
        kv_indices=partial[1],
        full_kv_num_blocks=full[0],
        full_kv_indices=full[1],
        q_num_blocks=partial_columns[0],
        q_indices=partial_columns[1],
        full_q_num_blocks=full_columns[0],
        full_q_indices=full_columns[1],
        BLOCK_SIZE=block_size,
        mask_mod=noop_mask,
    )


def _listed(blocks: Tensor) -> Lists:
    """Bool [B', H', Qb, Kb] as counts and indices, those that are True first."""
    indices = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), indices.to(torch.int32).contiguous()


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
