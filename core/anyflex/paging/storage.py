"""How a cache stores keys and values: as they are, or in 8 bits with a scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.contract.spec import STORED

__all__ = ["STORAGES", "bytes_of", "quantised"]

STORAGES: dict[str, torch.dtype | None] = {"plain": None, **{n: t for t, n in STORED.items()}}
"""dtype of the stored numbers, by the storage's name; None is that of the keys."""

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Scale of a row of zeros: nothing is divided by 0, and the row is read as zeros."""


def quantised(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return rows [..., E] as numbers of `dtype`, and their scale, float32 [...], by which a row's
    largest magnitude is the largest number that can be stored.

    A row that holds a NaN or an infinity has such a scale, so all of it is read as non-finite.
    """
    largest = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    scale = (rows.abs().amax(-1).float() / largest).clamp(min=_SMALLEST_SCALE)
    # The largest quotient is within 2^-22 of `largest`, and conversion rounds it there. A NaN may
    # become any int8: its scale isn't finite, so neither is a product with it.
    ratio = rows / scale[..., None]
    return (ratio.round_() if dtype is torch.int8 else ratio).to(dtype), scale


def bytes_of(pool: Tensor) -> Tensor:
    """Return the pool, as bytes where its numbers have 8 bits: torch indexes no float8."""
    return pool.view(torch.uint8) if pool.element_size() == 1 else pool
