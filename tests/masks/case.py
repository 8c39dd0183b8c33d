"""Cases of the ready-made masks, at any length, and the list of them all.

`live` says for one element whether it is live: with lists, loops and Python numbers, and never
with the mask's own expression. `make(n)` gives rows of about n tokens, so that the same list can
be built at sizes that nobody could check element by element.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyflex.tracing.mod_types import MaskMod

__all__ = ["CASES", "Case", "Made", "case", "lengths_of", "spread", "tensor"]

Live = Callable[[int, int, int, int], bool]
"""``live(b, h, q, k)``."""


@dataclass(frozen=True)
class Made:
    """A mask at one size: the project's, and its definition."""

    mask_mod: MaskMod
    live: Live
    q_length: int
    kv_length: int
    batch: int = 1
    heads: int = 1

    def dense(self) -> torch.Tensor:
        """bool [batch, heads, q_length, kv_length], element by element."""
        return torch.tensor(
            [
                [
                    [
                        [bool(self.live(b, h, q, k)) for k in range(self.kv_length)]
                        for q in range(self.q_length)
                    ]
                    for h in range(self.heads)
                ]
                for b in range(self.batch)
            ],
            dtype=torch.bool,
        ).reshape(self.batch, self.heads, self.q_length, self.kv_length)


@dataclass(frozen=True)
class Case:
    """A name, and a function from the number of tokens to the mask."""

    name: str
    make: Callable[[int], Made]


CASES: dict[str, Case] = {}


def case(make: Callable[[int], Made]) -> Callable[[int], Made]:
    """Enter the decorated function under its own name."""
    CASES[make.__name__] = Case(make.__name__, make)
    return make


def lengths_of(n: int, seed: int) -> list[int]:
    """Lengths of documents that add up to n: some are empty, most are short."""
    draw = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < n:
        lengths.append(min(draw.choice((0, 1, 2, 5, 9, 14)), n - sum(lengths)))
    return lengths


def spread(values: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
    """Each value as often as its length says."""
    return [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]


def tensor(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)
