"""Mask mods that combine other mask mods. torch.compile inlines them."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.tracing.mod_types import MaskMod

__all__ = ["and_masks", "noop_mask", "or_masks"]


def noop_mask(batch: Tensor, head: Tensor, token_q: Tensor, token_kv: Tensor) -> Tensor:
    """Mask mod for which every element is live. Its parameters have torch's names."""
    return batch.new_ones((), dtype=torch.bool)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """Return the mask mod that is live where all of `mask_mods` are; everywhere if there are none.

    Raises ArgumentTypeError, naming the position, for an argument that is not callable, and
    BlockMaskError for one that takes other arguments.

    Examples:
        >>> causal = lambda b, h, q, k: q >= k
        >>> window = lambda b, h, q, k: q - k < 128
        >>> sliding_window = and_masks(causal, window)
    """
    from anyflex.mods.factory_arguments import check_mods  # not at the top: it loads all mods

    check_mods("and_masks", mask_mods, "mask")

    def and_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        result = b.new_ones((), dtype=torch.bool)
        for mask_mod in mask_mods:
            result = result & mask_mod(b, h, q_idx, kv_idx)
        return result

    return and_mask


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """Return the mask mod that is live where any of `mask_mods` is; nowhere if there are none.

    Raises ArgumentTypeError, naming the position, for an argument that is not callable, and
    BlockMaskError for one that takes other arguments.
    """
    from anyflex.mods.factory_arguments import check_mods  # not at the top: it loads all mods

    check_mods("or_masks", mask_mods, "mask")

    def or_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        result = b.new_zeros((), dtype=torch.bool)
        for mask_mod in mask_mods:
            result = result | mask_mod(b, h, q_idx, kv_idx)
        return result

    return or_mask
