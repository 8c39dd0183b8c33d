"""Pairs that dropout keeps, by a text of their function that shares nothing with a backend."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["kept_pairs", "seed_of"]


def seed_of(number: int) -> int:
    """Return the seed that a call draws first after ``torch.manual_seed(number)``."""
    generator = torch.Generator().manual_seed(number)
    return int(torch.randint(2**53, (), generator=generator, dtype=torch.float64).item())


def _times(word: Tensor, factor: int) -> Tensor:
    """The low 32 bits of a product, by its halves."""
    high = ((word >> 16) * factor) % 2**16
    return ((word % 2**16) * factor + high * 2**16) % 2**32


def _hash(word: Tensor, between: Tensor | int = 0) -> Tensor:
    word = _times(word ^ word // 2**16, 0x21F0AAAD) ^ between
    word = _times(word ^ word // 2**15, 0x735A2D97)
    return word ^ word // 2**15


def kept_pairs(
    seed: int, p: float, batch: int, heads: int, q_length: int, kv_length: int
) -> Tensor:
    """Bool [batch, heads, q_length, kv_length]: True where the pair is kept."""
    b = torch.arange(batch).reshape(-1, 1, 1, 1)
    h = torch.arange(heads).reshape(-1, 1, 1)
    q = torch.arange(q_length).reshape(-1, 1)
    k = torch.arange(kv_length)
    low, high = seed % 2**32, (seed // 2**32) ^ 0x9E3779B9
    row, other = (_hash(_hash(_hash(b ^ word) ^ h) ^ q) for word in (low, high))
    return _hash(row ^ k, other) >= round(p * 2**32)
