"""Registers attention and masks with transformers, as a pair: with one alone masks are lost."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from anyflex_transformers.attention import attention
from anyflex_transformers.continuous_batching import BATCHED, attention_of_requests
from anyflex_transformers.masks import MASKS_TAKE_POSITIONS, mask, mask_at_positions

__all__ = ["NAME", "register"]

NAME = "anyflex"
"""Value of `attn_implementation` that chooses anyflex."""


def register() -> None:
    """Make "anyflex" an attention implementation of transformers, in this process.

    Importing the package has done it. Registering again changes nothing.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask_at_positions if MASKS_TAKE_POSITIONS else mask)
    # Without a mask: continuous batching asks for none where the name isn't registered.
    AttentionInterface.register(BATCHED, attention_of_requests)
