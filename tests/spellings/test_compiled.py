"""Under torch.compile(fullgraph=True) every spelling gives the graph that it gives eagerly.

A graph, its captured tensors and its numbers are all that a backend sees, so equal graphs are
equal values and gradients. Many mods share one compiled function: starting Dynamo costs the most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.tracing.trace import TracedMod, trace_mod
from tests.soak import SOAK
from tests.spellings.accepted import ACCEPTED
from tests.spellings.surroundings import function_of, tables

__all__: list[str] = []

CHUNKS = 16
"""Number of compiled functions that all spellings make. Each takes every sixteenth spelling."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def as_score(function: Callable[..., Any]) -> Callable[..., Any]:
    """A mask's or an integer's mod as a score mod."""
    return lambda s, b, h, q, k: function(s, b, h, q, k) * 1.0


def content(traced: TracedMod) -> tuple[Any, ...]:
    return traced.text, traced.captured, traced.ints, traced.floats


@pytest.mark.parametrize("first", range(CHUNKS)[:: 1 if SOAK else 16])
def test_a_compiled_trace_is_the_eager_one(first: int) -> None:
    captured = tables(torch.float32, learned=True)
    spellings = ACCEPTED[first::CHUNKS]
    mods = [as_score(function_of(spelling.expression, captured)) for spelling in spellings]

    def traces(x: Tensor) -> tuple[Tensor, list[Any]]:
        return x + 1.0, [content(trace_mod(mod, "score")) for mod in mods]

    _, found = torch.compile(traces, backend="eager", fullgraph=True)(torch.ones(1))
    _, wanted = traces(torch.ones(1))
    for spelling, (text, tensors, *numbers), (its_text, its_tensors, *its_numbers) in zip(
        spellings, found, wanted, strict=True
    ):
        assert text == its_text, spelling.expression
        assert numbers == its_numbers, spelling.expression
        for tensor, its_tensor in zip(tensors, its_tensors, strict=True):
            assert torch.equal(tensor, its_tensor), spelling.expression
            assert tensor.requires_grad == its_tensor.requires_grad, spelling.expression


# Spellings that Dynamo has to be taught, and a few of each family.
CALLED = [
    "torch.where(~m, s, w[k])",
    "s + (~q) * 0.01",
    "F.tanh(s) + F.sigmoid(w2[q, k])",
    "F.hardsigmoid(s) + F.hardswish(s)",
    "s * 2 if isinstance(s, torch.Tensor) else None",
    "s * 2 if torch.is_tensor(s) and isinstance(s, (int, torch.Tensor)) else None",
    "s if torch.is_floating_point(s) and not torch.is_floating_point(k) else None",
    "torch.lerp(s, w2[q][k], 0.25) + t0.exp()",
    "s + w[i16[k]] - w2.t()[k, q]",
    "torch.clamp(s, min=w[q] - 1, max=w[q] + 1)",
]


def test_compiled_calls_give_what_eager_calls_give() -> None:
    captured = tables(torch.float32, learned=True)
    mods = [function_of(expression, captured) for expression in CALLED]
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn((1, 2, 16, 4), generator=generator).requires_grad_() for _ in range(3)
    )
    leaves = [query, key, value, captured["w"], captured["w2"], captured["t0"]]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.stack([anyflex.flex_attention(query, key, value, mod) for mod in mods])

    wanted = attend(query, key, value)
    found = torch.compile(attend, backend="eager", fullgraph=True)(query, key, value)
    assert torch.equal(found, wanted)
    weights = torch.randn(wanted.shape, generator=generator)
    for a, b in zip(
        torch.autograd.grad(found, leaves, weights),
        torch.autograd.grad(wanted, leaves, weights),
        strict=True,
    ):
        assert torch.equal(a, b)
