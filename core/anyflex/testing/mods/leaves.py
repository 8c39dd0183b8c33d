"""Tensors that mods of the list capture, drawn from a generator for given sizes.

Float tables follow the call's dtype unless the list names another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Leaf",
    "Sizes",
    "booleans",
    "document_starts",
    "document_stops",
    "documents",
    "floats",
    "integers",
    "parents",
    "permutation",
    "shape_of",
    "spans",
]


@dataclass(frozen=True)
class Sizes:
    """Sizes that the shapes of captured tensors depend on; lengths may be 0."""

    batch: int
    heads: int
    group: int
    q_length: int
    kv_length: int

    @property
    def longest(self) -> int:
        """M of the list: length of tables that are read at both q and k."""
        return max(self.q_length, self.kv_length)

    @property
    def kv_heads(self) -> int:
        """Heads of key and value."""
        return self.heads // self.group


Draw = Callable[[Sizes, torch.Generator, torch.dtype], Tensor]


@dataclass(frozen=True)
class Leaf:
    """How one captured tensor is drawn, and whether its gradient is asked for."""

    draw: Draw
    grad: bool = False

    def make(self, sizes: Sizes, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Draw the tensor."""
        return self.draw(sizes, generator, dtype).requires_grad_(self.grad)


def shape_of(text: str, sizes: Sizes) -> tuple[int, ...]:
    """Sizes by the list's letters: ``"B H 2M-1 L/16"``."""
    letters = {
        "B": sizes.batch,
        "H": sizes.heads,
        "Hkv": sizes.kv_heads,
        "L": sizes.q_length,
        "S": sizes.kv_length,
        "M": sizes.longest,
        "2M-1": max(2 * sizes.longest - 1, 0),
        "L/16": -(-sizes.q_length // 16),
        "S/16": -(-sizes.kv_length // 16),
    }
    return tuple(letters[item] if item in letters else int(item) for item in text.split())


def floats(
    shape: str, dtype: torch.dtype | None = None, *, grad: bool = False, scale: float = 0.5
) -> Leaf:
    """Normal values times `scale`."""

    def draw(sizes: Sizes, generator: torch.Generator, default: torch.dtype) -> Tensor:
        values = torch.randn(shape_of(shape, sizes), generator=generator, dtype=torch.float64)
        return (values * scale).to(dtype or default)

    return Leaf(draw, grad)


def integers(shape: str, low: Any, high: Any, dtype: torch.dtype = torch.int32) -> Leaf:
    """Uniform integers in [low, high), each a number or a function of the sizes."""

    def draw(sizes: Sizes, generator: torch.Generator, _: torch.dtype) -> Tensor:
        first, last = (bound(sizes) if callable(bound) else bound for bound in (low, high))
        shape_ = shape_of(shape, sizes)
        return torch.randint(first, max(last, first + 1), shape_, generator=generator).to(dtype)

    return Leaf(draw)


def booleans(shape: str, probability: float) -> Leaf:
    """True with this probability."""

    def draw(sizes: Sizes, generator: torch.Generator, _: torch.dtype) -> Tensor:
        values = torch.rand(shape_of(shape, sizes), generator=generator, dtype=torch.float64)
        return values < probability

    return Leaf(draw)


def documents(shape: str, dtype: torch.dtype, *, shuffled: bool = False) -> Leaf:
    """Document ids along the last dimension: sorted, or in any order."""

    def draw(sizes: Sizes, generator: torch.Generator, _: torch.dtype) -> Tensor:
        shape_ = shape_of(shape, sizes)
        ids = torch.randint(0, max(shape_[-1] // 24, 3), shape_, generator=generator)
        return (ids if shuffled else ids.sort(-1).values).to(dtype)

    return Leaf(draw)


def permutation(shape: str, dtype: torch.dtype) -> Leaf:
    """A permutation of 0 .. n-1: a position for every element."""

    def draw(sizes: Sizes, generator: torch.Generator, _: torch.dtype) -> Tensor:
        (length,) = shape_of(shape, sizes)
        return torch.randperm(length, generator=generator).to(dtype)

    return Leaf(draw)


def _bounds(length: int) -> tuple[Tensor, Tensor]:
    # Lengths 7, 14, 21 ...: short and long documents, most ends inside of a block. The start and
    # stop leaves are drawn apart and must agree, so nothing here is random.
    starts = torch.zeros(length, dtype=torch.int32)
    stops = torch.full((length,), length, dtype=torch.int32)
    first, step = 0, 7
    while first < length:
        last = min(first + step, length)
        starts[first:last] = first
        stops[first:last] = last
        first, step = last, step + 7
    return starts, stops


def document_starts(shape: str) -> Leaf:
    """First position of each position's document."""
    return Leaf(lambda sizes, generator, dtype: _bounds(shape_of(shape, sizes)[0])[0])


def document_stops(shape: str) -> Leaf:
    """One past the last position of each position's document."""
    return Leaf(lambda sizes, generator, dtype: _bounds(shape_of(shape, sizes)[0])[1])


def parents(shape: str) -> Leaf:
    """A tree: parent[i] <= i."""

    def draw(sizes: Sizes, generator: torch.Generator, _: torch.dtype) -> Tensor:
        (length,) = shape_of(shape, sizes)
        share = torch.rand(length, generator=generator, dtype=torch.float64)
        return (share * torch.arange(length)).floor().to(torch.int32)

    return Leaf(draw)


def spans(shape: str) -> Leaf:
    """Numbered stretches of about 10 with text (-1) between them."""

    def draw(sizes: Sizes, generator: torch.Generator, _: torch.dtype) -> Tensor:
        (length,) = shape_of(shape, sizes)
        stretch = torch.arange(length) // 10
        keep = torch.rand(math.ceil(length / 10) + 1, generator=generator) < 0.5
        return torch.where(keep[stretch], stretch, -1).to(torch.int32)

    return Leaf(draw)
