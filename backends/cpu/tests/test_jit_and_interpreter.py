"""Compiled and interpreted mods, each the oracle of the other: compiled in the process, and as
bytecode in the library's interpreter."""

from __future__ import annotations

import pytest
import torch
from native_tiles import NativeTile, compiled
from random_graphs import RandomGraph
from tile_runs import Tile, operations
from torch import Tensor

from anyflex.plugin import ModGraph, Node, differentiate
from anyflex.plugin import simplify as simplified
from anyflex_cpu.bytecode import mask_program, score_backward_program, score_program
from anyflex_cpu.index_ranges import LIMITS, WIDE_LIMITS

pytest.importorskip("llvmlite", reason="mods are compiled by llvmlite, the extra `jit`")

SHAPES = [(1, 1), (3, 16), (17, 35), (20, 130), (5, 500)]
F32 = torch.float32


def tiles(mod: RandomGraph, seed: int, live: Tensor | None = None) -> tuple[Tile, NativeTile]:
    """The same tile twice, one for each."""
    rows, columns = SHAPES[seed % len(SHAPES)]
    places = (1, 2, seed % 10, seed // 3 % 10)
    offset = (0, 1, 0, 0) if seed % 2 else (1, 0, 5, 3)
    arguments = (rows, columns, places, mod.captured, mod.ints, mod.floats, live, offset)
    interpreted, native = Tile(*arguments), NativeTile(*arguments)
    generator = torch.Generator().manual_seed(seed)
    for name in ("score", "grad"):
        values = torch.randn(rows, columns, generator=generator) * 4
        for tile in (interpreted, native):
            getattr(tile, name)[:, :columns] = values
    return interpreted, native


def same(found: Tensor, wanted: Tensor) -> bool:
    return bool(((found == wanted) | (found.isnan() & wanted.isnan())).all())


@pytest.mark.parametrize("limits", [LIMITS, WIDE_LIMITS])
@pytest.mark.parametrize("seed", range(20))
def test_a_random_graph_gives_equal_bits(seed: int, limits) -> None:
    mod = RandomGraph(seed, F32, 5 + seed)
    graph = simplified(mod.graph)
    interpreted, native = tiles(mod, seed)
    interpreted.run(score_program(graph, operations(), limits))
    mods = compiled(score=graph, captured=mod.captured, limits=limits)
    native.run(mods.score)
    columns = native.columns
    assert same(native.score[:, :columns], interpreted.score[:, :columns]), str(graph)
    assert bool(native.notes) == (interpreted.error.code != 0)


@pytest.mark.parametrize("seed", range(100, 120))
def test_a_random_mask_gives_equal_words(seed: int) -> None:
    mod = RandomGraph(seed, torch.bool, 12)
    interpreted, native = tiles(mod, seed)
    interpreted.run(mask_program(mod.graph, operations()), mask=True)
    native.run(compiled(mask=mod.graph, captured=mod.captured).mask, mask=True)
    assert torch.equal(native.bits(), interpreted.bits()), str(mod.graph)
    if native.notes:
        assert interpreted.error.code != 0


@pytest.mark.parametrize("seed", range(200, 220))
def test_a_random_graphs_gradients_are_equal(seed: int) -> None:
    mod = RandomGraph(seed, F32, 12, learns=True)
    learned = [i for i, table in enumerate(mod.captured) if table.is_floating_point()]
    derivative = differentiate(mod.graph, wanted_captured=frozenset(learned))
    rows, columns = SHAPES[seed % len(SHAPES)]
    generator = torch.Generator().manual_seed(seed)
    live = torch.rand(rows, columns, generator=generator) < 0.7 if seed % 3 else None
    interpreted, native = tiles(mod, seed, live)
    native.want_gradients(learned)
    found: list[Tensor | None] = [
        torch.zeros(table.shape, dtype=torch.float64) if i in learned else None
        for i, table in enumerate(mod.captured)
    ]
    interpreted.run(score_backward_program(derivative, operations()), grads=found)
    native.run(compiled(derivative=derivative, captured=mod.captured).score_backward)
    assert same(native.grad[:, :columns], interpreted.grad[:, :columns]), str(mod.graph)
    for i in learned:
        torch.testing.assert_close(native.sums[i], found[i], rtol=1e-9, atol=1e-9, equal_nan=True)


FUNCTIONS = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh "
    "asinh acosh atanh sigmoid erf erfc"
).split()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementary_functions_agree_to_a_few_ulp(name: str) -> None:
    nodes = (Node("input", F32, (), "score"), Node(name, F32, (0,)))
    graph = ModGraph(nodes, 1)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(8, 512, generator=generator) * torch.logspace(-4, 2, 8)[:, None]
    results = []
    for tile in (Tile(8, 512), NativeTile(8, 512)):
        tile.score[:, :512] = numbers
        if isinstance(tile, Tile):
            tile.run(score_program(graph, operations()))
        else:
            tile.run(compiled(score=graph).score)
        results.append(tile.score[:, :512].clone())
    torch.testing.assert_close(*results, rtol=8 * 2.0**-23, atol=1e-7, equal_nan=True)
