"""Masks over equal pieces of a row: local chunks, block-causal, block diffusion."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.mods.factory_arguments import checked_int, query_position
from anyflex.tracing.mod_types import MaskMod

__all__ = ["block_causal", "block_diffusion", "chunked"]


def chunked(size: int, offset: int | Tensor = 0) -> MaskMod:
    """Return the mask mod that is live within chunks of `size` tokens, in both directions.

    ``and_masks(causal(), chunked(8192))`` is the local attention of long-context models.

    Args:
        size: at least 1.
        offset: of the query's place; see `anyflex.masks`.

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: a size below 1, or a tensor of a wrong rank.

    Source: Parmar et al. 2018, Image Transformer, arXiv:1802.05751 (local attention in blocks).
    """
    position = query_position("chunked: offset", offset)
    width = checked_int("chunked: size", size, 1)

    def chunked_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return position(b, q_idx) // width == kv_idx // width

    return chunked_mask


def block_causal(size: int, offset: int | Tensor = 0) -> MaskMod:
    """Return the mask mod that is causal over blocks of `size` tokens, and open within one.

    It is also what block diffusion uses to generate: one block after the other.

    Args:
        size: at least 1.
        offset: of the query's place; see `anyflex.masks`.

    Raises:
        ArgumentTypeError: a wrong type or dtype.
        ArgumentError: a size below 1, or a tensor of a wrong rank.

    Source: as `block_diffusion`.
    """
    position = query_position("block_causal: offset", offset)
    width = checked_int("block_causal: size", size, 1)

    def block_causal_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        return position(b, q_idx) // width >= kv_idx // width

    return block_causal_mask


def block_diffusion(length: int, size: int) -> MaskMod:
    """Return the mask mod with which block diffusion language models are trained.

    A row holds the noisy tokens, 0 to length - 1, and the same tokens clean, length to
    2 * length - 1. A noisy token sees its own noisy block and the clean blocks before it; a clean
    one sees the clean blocks up to its own.

    Args:
        length: of the text, at least 1; the call's lengths are twice that.
        size: of a block, at least 1; the last one may be shorter.

    Raises:
        ArgumentTypeError, ArgumentError: an argument that is no int, or below 1.

    Source: Arriola et al. 2025, Block Diffusion (BD3-LM), arXiv:2503.09573.
    """
    half = checked_int("block_diffusion: length", length, 1)
    width = checked_int("block_diffusion: size", size, 1)

    def block_diffusion_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        noisy_query, noisy_key = q_idx < half, kv_idx < half
        clean_block = (kv_idx - half) // width
        own = noisy_query & noisy_key & (q_idx // width == kv_idx // width)
        seen = torch.where(
            noisy_query, clean_block < q_idx // width, clean_block <= (q_idx - half) // width
        )
        return own | (~noisy_key & seen)

    return block_diffusion_mask
