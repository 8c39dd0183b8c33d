"""Dropout: the numbers of a call that decide which of its weights are dropped.

A pair is dropped by a pure function of these numbers and its four indices, so backward makes the
bits of forward again, for any tile size, and nothing of the size of the scores is stored.
docs/plugins-advanced.md has the function.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SEEDS", "Dropout"]

SEEDS = 1 << 53
"""Number of seeds: a seed is a whole number below this, which a float64 holds exactly."""

_WORD = (1 << 32) - 1


class Dropout(NamedTuple):
    """Attention dropout of one call.

    Args:
        p: probability with which a weight is dropped, from 0 up to, but not, 1.
        seed: a whole number below `SEEDS`.
    """

    p: float
    seed: float

    @property
    def words(self) -> tuple[int, int]:
        """The seed as two words of 32 bits. The constant keeps the second one apart from the
        first, which it would often equal otherwise: both are small for small seeds."""
        seed = int(self.seed)
        return seed & _WORD, seed >> 32 ^ 0x9E3779B9

    @property
    def threshold(self) -> int:
        """From 0 to 2^32 - 1: a pair is dropped if its 32 random bits are below it."""
        return min(round(self.p * (1 << 32)), _WORD)

    @property
    def scale(self) -> float:
        """Factor of the weights that are kept."""
        return 1 / (1 - self.p)
