"""Masks and score mods by name, as ``anyflex explain`` takes them, and random documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anyflex import and_masks, masks, mods
from anyflex.bench.named_mods import mask_mods, score_mods
from anyflex.bench.usage_errors import WrongUsage

__all__ = ["RANDOM_DOCUMENTS", "make_mask_mod", "make_score_mod"]

RANDOM_DOCUMENTS = "random_documents"
"""``random_documents:200,1800``: packed documents of 200 to 1799 tokens, always the same."""


def make_mask_mod(
    texts: Sequence[str], lengths: tuple[int, int], device: torch.device
) -> Callable[..., Any] | None:
    """Return the mask mod that is live where all masks that `texts` name are, None for none.

    Raises:
        WrongUsage: an unknown name, or arguments that the function doesn't take.
        ArgumentError, ArgumentTypeError: as the functions.
    """
    made = []
    for text in texts:
        name, _, arguments = text.partition(":")
        if name == RANDOM_DOCUMENTS:
            made.append(_random_documents(text, arguments, lengths[1], device))
        else:
            made += mask_mods([text], lengths, device)
    if len(made) < 2:
        return made[0] if made else None
    both: Callable[..., Any] = and_masks(*made)
    return both


def make_score_mod(
    texts: Sequence[str], heads: int, device: torch.device
) -> Callable[..., Any] | None:
    """Return the score mod that applies those that `texts` name, in order; None for none. Raises
    as `make_mask_mod`."""
    made = score_mods(texts, heads, device)
    if len(made) < 2:
        return made[0] if made else None
    composed: Callable[..., Any] = mods.compose(*made)
    return composed


def _random_documents(
    text: str, arguments: str, length: int, device: torch.device
) -> Callable[..., Any]:
    try:
        low, high = (int(part) for part in arguments.split(","))
    except ValueError:
        low = high = 0
    if not 0 < low < high:
        raise WrongUsage(f"--mask {text}: give the lengths, {RANDOM_DOCUMENTS}:200,1800")
    # A short sequence gets shorter documents, so that it too has several.
    low, high = min(low, max(1, length // 8)), min(high, max(2, length // 3))
    generator = torch.Generator().manual_seed(0)
    ends = torch.randint(low, high, (length // low + 1,), generator=generator).cumsum(0)
    ids = torch.bucketize(torch.arange(length), ends, right=True)
    return masks.document(ids.to(device))
