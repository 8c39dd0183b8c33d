"""Random score mods in Metal: values, slopes and captured gradients against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from metal_values import ModCase
from soak import SOAK
from torch import Tensor

from anyflex.plugin import Derivative, differentiate, evaluate, parse_graph, simplify
from anyflex.tracing.trace import TracedMod, trace_mod

expressions = pytest.importorskip(
    "tests.spellings.expressions", reason="run from the repository's root"
)

COUNT = 400 if SOAK else 12
PAIRS = 160
SIZE = expressions.SIZE
SHARE = 0.05
"""Pairs that may differ, the eight special scores among them: a rounding error may cross a kink of
the expression, or be multiplied, as in the remainder of exp(24)."""


def pairs(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {
        name: torch.randint(SIZE, (PAIRS,), generator=generator)
        for name in ("b", "h", "q_idx", "kv_idx")
    }
    found["score"] = torch.randn(PAIRS, generator=generator)
    found["score"][:8] = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.5, -3.0, 6.0, 30.0])
    found["grad"] = torch.randn(PAIRS, generator=generator)
    found["live"] = torch.rand(PAIRS, generator=generator) < 0.8
    return found


def with_tables(mod: Any, dtype: torch.dtype) -> Any:
    """Return the mod with its float64 tables rounded to float32, held in a type."""
    tables = [
        dataclasses.replace(table, value=table.value.detach().float().to(dtype))
        if table.kind == "f64"
        else table
        for table in mod.tables
    ]
    for table in tables:
        if table.value.is_floating_point():
            table.value.requires_grad_(table.leaf.requires_grad)
    return dataclasses.replace(mod, tables=tables)


def traced_as(mod: Any, dtype: torch.dtype) -> TracedMod:
    return trace_mod(with_tables(mod, dtype).function, "score", dtype)


def exact_gradients(
    derivative: Derivative, traced: TracedMod, inputs: dict[str, Tensor]
) -> tuple[Tensor, dict[int, Tensor], dict[int, Tensor]]:
    """Return the gradient of scores, the sums that the scatters of live pairs add, and the sums of
    the terms' sizes, all in float64."""
    wanted = [] if derivative.score is None else [derivative.score]
    for scatter in derivative.scatters:
        wanted += [scatter.value, *scatter.indices]
    values = iter(values_of(derivative.nodes, wanted, traced, inputs))
    score = torch.zeros(PAIRS) if derivative.score is None else next(values)
    live = inputs["live"]
    sums: dict[int, Tensor] = {}
    sizes: dict[int, Tensor] = {}
    for scatter in derivative.scatters:
        table = traced.captured[scatter.captured]
        value = next(values)[live].double()
        places = tuple(
            torch.where(index < 0, index + size, index).clamp(0, size - 1)
            for index, size in zip(
                (next(values)[live].long() for _ in scatter.indices), table.shape, strict=True
            )
        )
        for store, part in ((sums, value), (sizes, value.abs())):
            total = store.setdefault(
                scatter.captured, torch.zeros(table.shape, dtype=torch.float64)
            )
            if places:
                total.index_put_(places, part, accumulate=True)
            else:
                total += part.sum()
    return score.double(), sums, sizes


def values_of(
    nodes: Any, wanted: list[int], traced: TracedMod, inputs: dict[str, Tensor]
) -> list[Tensor]:
    found = evaluate(
        nodes,
        wanted,
        inputs=inputs,
        captured=[tensor.detach() for tensor in traced.captured],
        ints=traced.ints,
        floats=traced.floats,
    )
    return [each.expand(PAIRS) for each in found]


def wrong(found: Tensor, wanted: Tensor, size: Tensor | float = 1.0) -> float:
    """Return the share of elements that differ."""
    found, wanted = found.double(), wanted.double()
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    close = (found - wanted).abs() <= 2e-3 * (wanted.abs() + size)
    return 1 - (same | close).double().mean().item()


@pytest.mark.parametrize("seed", range(COUNT))
def test_a_random_mod(seed: int) -> None:
    mod, inputs = expressions.random_mod(seed), pairs(seed)
    traced, exact = traced_as(mod, torch.float32), traced_as(mod, torch.float64)
    graph, wide = (simplify(parse_graph(each.text)) for each in (traced, exact))
    if any(node.dtype is torch.float64 for node in graph.nodes):
        pytest.skip("the mod itself asks for float64")
    learned = [
        i for i, t in enumerate(traced.captured) if t.requires_grad and t.is_floating_point()
    ]
    differentiable = graph.dtype.is_floating_point
    case = ModCase(
        inputs,
        graph,
        captured=[tensor.detach() for tensor in traced.captured],
        learned=learned if differentiable else [],
        ints=traced.ints,
        floats=traced.floats,
    )
    scores, _, slopes, totals = case.run()
    inputs = {**inputs, "score": inputs["score"].double(), "grad": inputs["grad"].double()}
    (wanted,) = values_of(wide.nodes, [wide.output], exact, inputs)
    assert wrong(scores, wanted) <= SHARE, f"{mod}\n{graph}"
    if not differentiable:
        return
    derivative = differentiate(wide, wanted_captured=frozenset(learned))
    score, sums, sizes = exact_gradients(derivative, exact, inputs)
    assert wrong(slopes, score) <= SHARE, f"{mod}\n{graph}"
    for found in (totals, case.exact_totals()):
        for place, total in zip(learned, found, strict=True):
            nothing = torch.zeros(total.shape, dtype=torch.float64)
            size = sizes.get(place, nothing)
            # Sums of huge terms say nothing.
            strange = ~size.isfinite() | (size > 1e30)
            its = torch.where(strange, total.double(), sums.get(place, nothing))
            off = wrong(total, its, 1 + size.masked_fill(strange, 0))
            assert off <= 0.3, f"{place}: {off}\n{mod}\n{graph}"
