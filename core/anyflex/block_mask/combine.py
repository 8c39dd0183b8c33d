"""Mask mods that combine other mask mods. torch.compile inlines them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.tensors.dynamo_errors import fail
from anyflex.tracing.mod_types import MaskMod
from anyflex.tracing.trace import check_signature

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
    _check_members("and_masks", mask_mods)

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
    _check_members("or_masks", mask_mods)

    def or_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        result = b.new_zeros((), dtype=torch.bool)
        for mask_mod in mask_mods:
            result = result | mask_mod(b, h, q_idx, kv_idx)
        return result

    return or_mask


def _check_members(function: str, mask_mods: tuple[Any, ...]) -> None:
    for position, mask_mod in enumerate(mask_mods):
        if not callable(mask_mod):
            fail(
                "ArgumentTypeError",
                f"{function}: argument {position} must be a mask mod, got "
                f"{type(mask_mod).__name__}",
            )
        check_signature(mask_mod, "mask", f"{function}: argument {position}")
