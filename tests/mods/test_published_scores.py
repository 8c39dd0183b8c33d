"""Score mods of published collections: value and gradients are those of the dense formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from tests.mods.published_scores import HEADS, LENGTH, PUBLISHED_SCORES, fast_tanh
from tests.spellings.accepted import LINES
from tests.spellings.surroundings import function_of

__all__: list[str] = []

NAMES = set("alibi graphormer latent_attention distance_in_space sandwich softcapping".split())
ACTIVATIONS = [line.split(" ", 2)[2] for line in LINES["activations"].strip().splitlines()]

pytestmark = pytest.mark.usefixtures("float64_numbers")


def test_the_collection_is_complete() -> None:
    assert set(PUBLISHED_SCORES) == NAMES


@pytest.mark.parametrize("name", PUBLISHED_SCORES)
def test_a_published_score_mod(name: str) -> None:
    for mod, formula, leaves in PUBLISHED_SCORES[name](torch.Generator().manual_seed(1)):
        compare(mod, formula, leaves)


@pytest.mark.parametrize("expression", ACTIVATIONS)
def test_an_activation_of_the_score(expression: str) -> None:
    mod = function_of(expression, {})
    index = torch.zeros((), dtype=torch.int64)
    compare(mod, lambda scores: mod(scores, index, index, index, index), [])


def test_the_fast_tanh_is_as_exact_as_it_says() -> None:
    x = torch.linspace(-9, 9, 10001)
    assert (fast_tanh(x) - torch.tanh(x)).abs().max() < 1e-4


def compare(
    mod: Callable[..., Any], formula: Callable[[Tensor], Tensor], leaves: list[Tensor]
) -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn((2, HEADS, LENGTH, 8), generator=generator).requires_grad_() for _ in range(3)
    )
    found = anyflex.flex_attention(query, key, value, mod)
    scores = query @ key.transpose(-1, -2) / 8**0.5
    wanted = torch.softmax(formula(scores), -1) @ value
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    weights = torch.randn(wanted.shape, generator=generator)
    inputs = [query, key, value, *leaves]
    for a, b in zip(
        torch.autograd.grad(found, inputs, weights),
        torch.autograd.grad(wanted, inputs, weights),
        strict=True,
    ):
        # torch's celu and hardsigmoid hold constants of their slopes in float32.
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
