"""The masks and score mods that ``anyflex explain --mask ... --mod ...`` has names for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anyflex.cli.exit_codes import WrongUsage

__all__ = ["MASKS", "MODS", "mask_named", "mod_named"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

MASKS = "none, causal, window:SIZE, document"
MODS = "none, alibi, softcap:LIMIT"

_DOCUMENTS = 8
"""Documents that ``document`` packs into a row."""


def mask_named(text: str, length: int, device: torch.device) -> MaskMod | None:
    """Return the mask function that `text` names, or None for ``none``.

    Args:
        length: of the longer of query and key.

    Raises:
        WrongUsage: the name is unknown, or its number is missing or wrong.
    """
    name, number = _split(text, "--mask", MASKS)

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    if name == "none":
        return None
    if name == "causal":
        return causal
    if name == "window":
        size = int(number)
        if size != number:
            raise WrongUsage(f"--mask {text}: SIZE must be a whole number")

        def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (q_idx >= kv_idx) & (q_idx - kv_idx < size)

        return window
    ids = torch.arange(length, device=device) * _DOCUMENTS // max(length, 1)

    def document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (ids[q_idx] == ids[kv_idx])

    return document


def mod_named(text: str, heads: int, device: torch.device) -> ScoreMod | None:
    """Return the score mod that `text` names, or None for ``none``.

    Raises:
        WrongUsage: the name is unknown, or its number is missing or wrong.
    """
    name, number = _split(text, "--mod", MODS)
    if name == "none":
        return None
    if name == "softcap":
        limit = number

        def softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return limit * torch.tanh(score / limit)

        return softcap
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device) / heads)

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - kv_idx)

    return alibi


def _split(text: str, option: str, known: str) -> tuple[str, float]:
    """Return name and number (0.0 where the name takes none)."""
    name, colon, number = text.partition(":")
    takes_number = {item.partition(":")[0]: ":" in item for item in known.split(", ")}
    if name not in takes_number:
        raise WrongUsage(f"{option} {text}: there is no {name!r}; known: {known}")
    if not takes_number[name]:
        if colon:
            raise WrongUsage(f"{option} {text}: {name} takes no number")
        return name, 0.0
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise WrongUsage(f"{option} {text}: {name} needs a positive number; known: {known}")
    return name, value
