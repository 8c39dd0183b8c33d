"""Compiled mods on random expressions, forward and backward, against torch's evaluation of the
same graphs and against the interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from native_tiles import NativeTile, compiled, expected, expected_gradients
from soak import SOAK
from torch import Tensor

from anyflex.plugin import ModGraph, differentiate, parse_graph, simplify

pytest.importorskip("llvmlite", reason="mods are compiled by llvmlite, the extra `jit`")
expressions = pytest.importorskip(
    "tests.spellings.expressions", reason="run from the repository's root"
)
trace = pytest.importorskip("anyflex.tracing.trace")

COUNT = 500 if SOAK else 50
SIZE = expressions.SIZE
COLUMNS = 2 * SIZE


def tile_of(seed: int, captured: list[Tensor], traced) -> NativeTile:
    generator = torch.Generator().manual_seed(seed)
    tile = NativeTile(
        SIZE,
        SIZE,
        places=(seed % SIZE, seed // 3 % SIZE, 0, 0),
        captured=captured,
        ints=traced.ints,
        floats=traced.floats,
    )
    tile.score[:, :SIZE] = torch.randn(SIZE, SIZE, generator=generator)
    tile.score[0, :8] = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.5, -3.0, 6.0, 30.0])
    tile.grad[:, :SIZE] = torch.randn(SIZE, SIZE, generator=generator)
    return tile


def wrong(got: Tensor, wanted: Tensor, tolerance: float) -> float:
    """Share of elements that differ."""
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    close = (got - wanted).abs() <= tolerance * (1 + wanted.abs())
    return 1 - (same | close).double().mean().item()


# In float32 a rounding error may cross a kink of the expression.
@pytest.mark.parametrize(
    ("dtype", "tolerance", "share"), [(torch.float64, 1e-6, 0.0), (torch.float32, 2e-3, 0.03)]
)
@pytest.mark.parametrize("seed", range(COUNT))
def test_a_random_mod(seed: int, dtype: torch.dtype, tolerance: float, share: float) -> None:
    mod = expressions.random_mod(seed)
    if dtype is torch.float32:
        for i, table in enumerate(mod.tables):
            if table.kind == "f64":
                narrow = table.value.detach().float().requires_grad_(table.leaf.requires_grad)
                mod.tables[i] = dataclasses.replace(table, value=narrow, leaf=narrow)
    traced = trace.trace_mod(mod.function, "score", dtype)
    graph = simplify(parse_graph(traced.text))
    captured = [tensor.detach() for tensor in traced.captured]
    mods = compiled(score=graph, captured=captured)
    tile = tile_of(seed, captured, traced)
    (wanted,) = expected(tile, graph.nodes, [graph.output])
    tile.run(mods.score)
    bad = wrong(tile.score[:, :SIZE], wanted.float(), tolerance)
    assert bad <= share, f"{bad}\n{mod}\n{graph}"
    assert tile.notes == []
    if graph.dtype.is_floating_point:
        check_gradients(seed, graph, traced, captured, mod, tolerance, share)


def check_gradients(seed, graph: ModGraph, traced, captured, mod, tolerance, share) -> None:
    wanted = frozenset(
        i for i, t in enumerate(traced.captured) if t.requires_grad and t.is_floating_point()
    )
    derivative = differentiate(graph, wanted_captured=wanted)
    mods = compiled(derivative=derivative, captured=captured)
    tile = tile_of(seed, captured, traced)
    tile.want_gradients(sorted(wanted))
    alive = torch.ones(SIZE, SIZE, dtype=torch.bool)
    score, sums, sizes = expected_gradients(tile, derivative, alive)
    tile.run(mods.score_backward)
    bad = wrong(tile.grad[:, :SIZE], score, tolerance)
    assert bad <= share, f"{bad}\n{mod}\n{graph}"
    for position, total in sums.items():
        got = tile.sums[position]
        strange = ~sizes[position].isfinite() | (sizes[position] > 1e30)
        error = (got - total).abs().masked_fill(strange, 0)
        bound = tolerance * (1 + sizes[position]).masked_fill(strange, 1)
        off = (error > bound).double().mean().item()
        assert off <= 10 * share, f"{position}: {off}\n{mod}\n{graph}"
