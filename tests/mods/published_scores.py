"""Score mods of the kinds that published collections hold, each beside its dense formula.

An entry is (score mod, formula, learned tensors); a formula takes scores [B, H, L, S] and returns
such. Batch 2, heads 4, `LENGTH` queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["HEADS", "LENGTH", "PUBLISHED_SCORES", "fast_tanh"]

LENGTH, HEADS = 20, 4

Entry = tuple[Callable[..., Any], Callable[[Tensor], Tensor], list[Tensor]]
PUBLISHED_SCORES: dict[str, Callable[[torch.Generator], list[Entry]]] = {}


def _published(make: Callable[[torch.Generator], list[Entry]]) -> None:
    PUBLISHED_SCORES[make.__name__] = make


def learned(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def distances() -> Tensor:
    """[L, S]: key minus query."""
    places = torch.arange(LENGTH, dtype=torch.float64)
    return places[None, :] - places[:, None]


@_published
def alibi(generator: torch.Generator) -> list[Entry]:
    # Slopes 2 ** -2, 2 ** -4, 2 ** -6, 2 ** -8, made in the mod and read from a table.
    table = torch.tensor([2.0**-power for power in (2, 4, 6, 8)])

    def formula(scores: Tensor) -> Tensor:
        return scores + torch.stack([2.0**-power * distances() for power in (2, 4, 6, 8)])

    return [
        (lambda s, b, h, q, k: s + torch.exp2(-8.0 / HEADS * (h + 1)) * (k - q), formula, []),
        (lambda s, b, h, q, k: s + table[h] * (k - q), formula, []),
    ]


@_published
def graphormer(generator: torch.Generator) -> list[Entry]:
    distance = torch.randint(0, 30, (2, LENGTH, LENGTH), generator=generator)
    edge = torch.randint(0, 6, (2, LENGTH, LENGTH), generator=generator).to(torch.int16)
    by_distance, by_edge = learned(generator, HEADS, 10), learned(generator, 6, HEADS)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        far = distance[b, q, k].clamp(max=9)
        return s + by_distance[h, far] + by_edge[edge[b][q][k].long()][h]

    def formula(scores: Tensor) -> Tensor:
        near = by_distance[:, distance.clamp(max=9)].transpose(0, 1)
        return scores + near + by_edge[edge.long()].permute(0, 3, 1, 2)

    return [(mod, formula, [by_distance, by_edge])]


@_published
def latent_attention(generator: torch.Generator) -> list[Entry]:
    width = 4
    rotary_query = learned(generator, 2, HEADS, LENGTH, width)
    rotary_key = learned(generator, 2, LENGTH, width)
    scale = 1.0 / math.sqrt(8 + width)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + scale * sum(
            rotary_query[b, h, q, d] * rotary_key[b, k, d] for d in range(width)
        )

    def formula(scores: Tensor) -> Tensor:
        return scores + scale * torch.einsum("bhqd,bkd->bhqk", rotary_query, rotary_key)

    def of_rows(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + scale * (rotary_query[b, h, q] * rotary_key[b, k]).sum(-1)

    def product(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.add(s, torch.dot(rotary_query[b, h, q], rotary_key[b, k]) * scale)

    leaves = [rotary_query, rotary_key]
    return [(mod, formula, leaves), (of_rows, formula, leaves), (product, formula, leaves)]


@_published
def distance_in_space(generator: torch.Generator) -> list[Entry]:
    places, weight = learned(generator, 2, LENGTH, 3), learned(generator, HEADS)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s - weight[h].exp() * (places[b, q] - places[b, k]).norm()

    def formula(scores: Tensor) -> Tensor:
        apart = (places[:, None, :, None] - places[:, None, None]).norm(dim=-1)
        return scores - weight.exp()[:, None, None] * apart

    return [(mod, formula, [places, weight])]


@_published
def sandwich(generator: torch.Generator) -> list[Entry]:
    frequencies = [10000.0 ** (-i / 8) for i in range(8)]
    weight = learned(generator, HEADS)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        waves = sum(torch.cos((q - k) * frequency) for frequency in frequencies)
        return s + weight[h] * (waves - 8) / 8

    def formula(scores: Tensor) -> Tensor:
        angles = distances()[..., None] * torch.tensor(frequencies, dtype=torch.float64)
        return scores + weight[:, None, None] * (angles.cos().mean(-1) - 1)

    return [(mod, formula, [weight])]


def fast_tanh(x: Any) -> Any:
    """A rational function with tanh's shape, off by less than 1e-4; torch's functions alone."""
    x = torch.clamp(x, -4.97, 4.97)
    y = x * x
    above = x * (135135 + y * (17325 + y * (378 + y)))
    return above / (135135 + y * (62370 + y * (3150 + 28 * y)))


@_published
def softcapping(generator: torch.Generator) -> list[Entry]:
    cap = 1.5
    return [
        (lambda s, b, h, q, k: cap * torch.tanh(s / cap), lambda x: 1.5 * torch.tanh(x / 1.5), []),
        (lambda s, b, h, q, k: cap * fast_tanh(s / cap), lambda x: 1.5 * fast_tanh(x / 1.5), []),
    ]
