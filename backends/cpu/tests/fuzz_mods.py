"""Score and mask functions that the fuzzer draws: written once for anyflex, once for the formula.

A function gets its tensors through a `Reader`. anyflex's reader indexes; the formula's also notes
which pairs read outside, and reads some element inside instead.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["MASKS", "SCORES", "Drawn", "Noting", "Sizes", "index"]

Reader = Callable[..., Any]
Sizes = tuple[int, int, int, int]
"""Batch, query heads, query length, key length."""


def index(table: Tensor, *at: Any) -> Any:
    """Read as users write it."""
    return table[at]


@dataclass
class Noting:
    """Reads by the formula.

    Attributes:
        outside: bool, broadcastable to [B, H, L, S]: pairs that have read outside.
    """

    outside: Tensor = field(default_factory=lambda: torch.zeros(1, 1, 1, 1, dtype=torch.bool))

    def __call__(self, table: Tensor, *at: Any) -> Tensor:
        inside = []
        for size, each in zip(table.shape, at, strict=True):
            each = torch.as_tensor(each).long()
            self.outside = self.outside | (each < -size) | (each >= size)
            wrapped = torch.where(each < 0, each + size, each)
            inside.append(wrapped.clamp(0, max(size - 1, 0)))
        if table.numel() == 0:
            return torch.zeros((), dtype=table.dtype)
        return table[tuple(inside)]


@dataclass
class Drawn:
    """A function with its tensors.

    Args:
        make: ``make(read, tensors)`` returns the function.
        tensors: what it captures.
        learned: positions in `tensors` of those that may require a gradient.
    """

    make: Callable[[Reader, list[Tensor]], Callable[..., Any]]
    tensors: list[Tensor] = field(default_factory=list)
    learned: tuple[int, ...] = ()

    def function(self, read: Reader, tensors: list[Tensor] | None = None) -> Callable[..., Any]:
        return self.make(read, self.tensors if tensors is None else tensors)


FLOATS = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def reach(draw: random.Random, size: int) -> int:
    """A table's size: mostly the size that is read, sometimes less, or 0."""
    return draw.choice([size, size, size, size + 3, size + 3, max(size - 1, 0), size // 2, 0])


def floats(draw: random.Random, *shape: int) -> Tensor:
    """A table of floats: contiguous, transposed, expanded or with gaps."""
    dtype = draw.choice(FLOATS)
    way = draw.randrange(4)
    if way == 0 and shape:
        return torch.randn(*shape[:-1], 1).to(dtype).expand(shape)
    if way == 1 and shape:
        return torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., ::2]
    if way == 2 and len(shape) == 2:
        return torch.randn(shape[1], shape[0]).to(dtype).mT
    return torch.randn(shape).to(dtype)


def indices(draw: random.Random, size: int, low: int, high: int) -> Tensor:
    """Indices in low..high, both included."""
    dtype = draw.choice(INTEGERS)
    bounds = torch.iinfo(dtype)
    low, high = max(low, bounds.min), min(high, bounds.max)
    return torch.randint(low, max(high, low) + 1, (size,), dtype=dtype)


def wide(value: Any) -> Any:
    """Learned tables of the formula are float64: arithmetic of 16 bits would round in anyflex and
    not in the formula."""
    return value.to(torch.float32)


def plain(function: Callable[..., Any]) -> Callable[[random.Random, Sizes], Drawn]:
    return lambda draw, sizes: Drawn(lambda read, tensors: function)


def of_heads(draw: random.Random, sizes: Sizes) -> Drawn:
    def make(read: Reader, t: list[Tensor]) -> Callable[..., Any]:
        return lambda s, b, h, q, k: s + wide(read(t[0], h)) * (k - q) / 16

    return Drawn(make, [floats(draw, reach(draw, sizes[1]))], (0,))


def of_keys(draw: random.Random, sizes: Sizes) -> Drawn:
    def make(read: Reader, t: list[Tensor]) -> Callable[..., Any]:
        return lambda s, b, h, q, k: s + wide(read(t[0], b, k))

    shape = (reach(draw, sizes[0]), reach(draw, sizes[3]))
    return Drawn(make, [floats(draw, *shape)], (0,))


def of_distances(draw: random.Random, sizes: Sizes) -> Drawn:
    """Negative indices count from the end."""
    span = draw.choice([1, 5, 40])

    def make(read: Reader, t: list[Tensor]) -> Callable[..., Any]:
        return lambda s, b, h, q, k: s * wide(read(t[0], torch.clamp(q - k, -span, span - 1)))

    return Drawn(make, [floats(draw, reach(draw, span))], (0,))


def of_pairs(draw: random.Random, sizes: Sizes) -> Drawn:
    def make(read: Reader, t: list[Tensor]) -> Callable[..., Any]:
        return lambda s, b, h, q, k: s + wide(read(t[0], q, k))

    shape = (reach(draw, sizes[2]), reach(draw, sizes[3]))
    return Drawn(make, [floats(draw, *shape)], (0,))


def by_indices(draw: random.Random, sizes: Sizes) -> Drawn:
    """A table read at positions that another tensor holds; some lie outside."""
    size = draw.choice([1, 4, 9])
    over = draw.choice([0, 0, 0, 1, 1000])
    low, high = draw.choice([(0, size - 1), (-size, size - 1)])
    positions = indices(draw, reach(draw, sizes[3]), low - over, high + over)

    def make(read: Reader, t: list[Tensor]) -> Callable[..., Any]:
        return lambda s, b, h, q, k: s + wide(read(t[0], read(t[1], k)))

    return Drawn(make, [floats(draw, size), positions], (0,))


def by_flags(draw: random.Random, sizes: Sizes) -> Drawn:
    def make(read: Reader, t: list[Tensor]) -> Callable[..., Any]:
        return lambda s, b, h, q, k: torch.where(read(t[0], k), s, s * t[1])

    flags = torch.rand(reach(draw, sizes[3])) < 0.5
    return Drawn(make, [flags, torch.tensor(draw.uniform(-1, 1))], (1,))


def far_outside(draw: random.Random, sizes: Sizes) -> Drawn:
    far = draw.choice([10**6, 2**31, 2**40, -(2**33)])

    def make(read: Reader, t: list[Tensor]) -> Callable[..., Any]:
        return lambda s, b, h, q, k: s + wide(read(t[0], k * far))

    return Drawn(make, [floats(draw, reach(draw, 3))])


def with_numbers(draw: random.Random, sizes: Sizes) -> Drawn:
    shift, factor = draw.randint(-5, 5), draw.uniform(-2, 2)

    def make(read: Reader, t: list[Tensor]) -> Callable[..., Any]:
        return lambda s, b, h, q, k: s * factor + ((q + shift) // 3 - k % 7) * 0.125

    return Drawn(make)


SCORES: dict[str, Callable[[random.Random, Sizes], Drawn]] = {
    "softcap": plain(lambda s, b, h, q, k: 3 * torch.tanh(s / 3)),
    "squares": plain(lambda s, b, h, q, k: s * s * 0.25 - s),
    "own mask": plain(lambda s, b, h, q, k: torch.where(k <= q + 2, s, -torch.inf)),
    "sigmoid": plain(lambda s, b, h, q, k: torch.sigmoid(s) + torch.exp(s * 0.125)),
    "of heads": of_heads,
    "of keys": of_keys,
    "of distances": of_distances,
    "of pairs": of_pairs,
    "by indices": by_indices,
    "by flags": by_flags,
    "far outside": far_outside,
    "with numbers": with_numbers,
}


def window(draw: random.Random, sizes: Sizes) -> Drawn:
    width = draw.choice([1, 7, 50])
    return Drawn(lambda read, t: lambda b, h, q, k: (q - k).abs() < width)


def documents(draw: random.Random, sizes: Sizes) -> Drawn:
    def make(read: Reader, t: list[Tensor]) -> Callable[..., Any]:
        return lambda b, h, q, k: read(t[0], q) == read(t[1], k)

    return Drawn(make, [indices(draw, sizes[2], 0, 3), indices(draw, reach(draw, sizes[3]), 0, 3)])


def lengths(draw: random.Random, sizes: Sizes) -> Drawn:
    def make(read: Reader, t: list[Tensor]) -> Callable[..., Any]:
        return lambda b, h, q, k: k < read(t[0], b)

    return Drawn(make, [indices(draw, sizes[0], -2, sizes[3] + 2)])


def any_pairs(draw: random.Random, sizes: Sizes) -> Drawn:
    def make(read: Reader, t: list[Tensor]) -> Callable[..., Any]:
        return lambda b, h, q, k: read(t[0], h, q, k)

    share = draw.choice([0.02, 0.5, 0.98])
    return Drawn(make, [torch.rand(sizes[1:]) < share])


def any_blocks(draw: random.Random, sizes: Sizes) -> Drawn:
    """Random blocks: rows of a block mask then have gaps, and FULL blocks between them."""
    rows, columns = draw.choice([(16, 32), (128, 64), (100, 200)])

    def make(read: Reader, t: list[Tensor]) -> Callable[..., Any]:
        return lambda b, h, q, k: read(t[0], q // rows, k // columns)

    shape = (-(-sizes[2] // rows), -(-sizes[3] // columns))
    share = draw.choice([0.1, 0.5, 0.9])
    return Drawn(make, [torch.rand(shape) < share])


MASKS: dict[str, Callable[[random.Random, Sizes], Drawn]] = {
    "causal": plain(lambda b, h, q, k: q >= k),
    "all": plain(lambda b, h, q, k: k >= 0),
    "nothing": plain(lambda b, h, q, k: k < 0),
    "stripes": plain(lambda b, h, q, k: (q + k + h) % 3 > 0),
    "window": window,
    "documents": documents,
    "lengths": lengths,
    "any pairs": any_pairs,
    "any blocks": any_blocks,
}
