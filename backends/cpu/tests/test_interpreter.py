"""Programs of bytecode on tiles: values, live bits, gradients, reads outside."""

from __future__ import annotations

import pytest
import torch
from random_graphs import RandomGraph
from tile_runs import (
    OK,
    READ_OUTSIDE,
    Tile,
    expected_gradients,
    expected_output,
    operations,
)
from torch import Tensor

from anyflex.plugin import (
    DTYPES,
    Derivative,
    Node,
    Scatter,
    differentiate,
    parse_graph,
    simplify,
)
from anyflex_cpu.bytecode import mask_program, score_backward_program, score_program
from anyflex_cpu.index_ranges import LIMITS, WIDE_LIMITS

__all__: list[str] = []

I64 = torch.int64
CAUSAL = parse_graph("input i64 - q_idx;input i64 - kv_idx;ge bool 0,1 -;=2")
SHAPES = [(1, 1), (3, 16), (17, 35), (40, 130), (5, 600), (300, 20)]


def random_live(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, columns, generator=generator) < 0.7


def same(found: Tensor, wanted: Tensor) -> Tensor:
    return (found == wanted) | (found.isnan() & wanted.isnan())


def of(mod: RandomGraph, rows: int, columns: int, live: Tensor | None = None) -> Tile:
    places = (1, 2, mod.draw.randint(0, 9), mod.draw.randint(0, 9))
    offset = (0, 1, 0, 0) if mod.draw.random() < 0.5 else (1, 0, 5, 3)
    tile = Tile(rows, columns, places, mod.captured, mod.ints, mod.floats, live, offset)
    scores = torch.randn(rows, columns, generator=mod.generator) * 4
    tile.score[:, :columns] = scores
    tile.grad[:, :columns] = torch.randn(rows, columns, generator=mod.generator)
    return tile


@pytest.mark.parametrize("seed", range(40))
def test_a_random_score_graph_has_torchs_bits(seed: int, level: str) -> None:
    mod = RandomGraph(seed, torch.float32, 30)
    rows, columns = SHAPES[seed % len(SHAPES)]
    tile = of(mod, rows, columns)
    wanted = expected_output(tile, mod.graph)
    scores = tile.score.clone()
    for limits in (LIMITS, WIDE_LIMITS):
        tile.score.copy_(scores)
        tile.run(score_program(mod.graph, operations(), limits))
        equal = same(tile.score[:, :columns], wanted)
        assert equal.all(), f"{mod.graph}\n{(~equal).nonzero()[:4]} {limits}"


@pytest.mark.parametrize("seed", range(100, 120))
def test_a_random_mask_graph_has_torchs_bits(seed: int, level: str) -> None:
    mod = RandomGraph(seed, torch.bool, 25)
    rows, columns = SHAPES[seed % len(SHAPES)]
    tile = of(mod, rows, columns)
    wanted = expected_output(tile, mod.graph)
    tile.run(mask_program(mod.graph, operations()), mask=True)
    assert (tile.bits() == wanted).all(), f"{mod.graph}"


@pytest.mark.parametrize("seed", range(200, 230))
def test_a_random_graphs_gradients_are_torchs(seed: int, level: str) -> None:
    mod = RandomGraph(seed, torch.float32, 15, learns=True)
    learned = [i for i, table in enumerate(mod.captured) if table.is_floating_point()]
    derivative = differentiate(mod.graph, wanted_captured=frozenset(learned))
    rows, columns = SHAPES[seed % len(SHAPES)]
    live = random_live(rows, columns, seed) if seed % 3 else None
    tile = of(mod, rows, columns, live)
    grads = tile.grad.clone()
    everywhere = torch.ones(rows, columns, dtype=torch.bool)
    score, sums = expected_gradients(tile, derivative, everywhere if live is None else live)
    code = score_backward_program(derivative, operations())
    found: list[Tensor | None] = [None] * len(mod.captured)
    for i in learned:
        found[i] = torch.zeros(mod.captured[i].shape, dtype=torch.float64)
    tile.grad.copy_(grads)
    tile.run(code, grads=found)
    equal = same(tile.grad[:, :columns], score)
    assert equal.all(), f"{mod.graph}\n{(~equal).nonzero()[:4]}"
    for i, total in sums.items():
        torch.testing.assert_close(found[i], total, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_a_causal_mask_past_the_last_column_has_no_live_bits(level: str) -> None:
    for columns in (1, 15, 16, 17, 250, 256, 257, 300):
        tile = Tile(70, columns, (0, 0, 100, 60))
        tile.words.fill_(-1)
        tile.run(mask_program(CAUSAL, operations()), mask=True)
        assert (tile.bits() == expected_output(tile, CAUSAL)).all()


def test_indices_beyond_int32_are_wide() -> None:
    graph = parse_graph(
        "input i64 - q_idx;const i64 - 5000000000;add i64 0,1 -;input i64 - kv_idx;"
        "mul i64 2,3 -;const i64 - 40000000000;ge bool 4,5 -;=6"
    )
    tile = Tile(20, 40)
    tile.run(mask_program(graph, operations()), mask=True)
    assert (tile.bits() == expected_output(tile, graph)).all()
    far = Tile(20, 40, (0, 0, 1 << 40, (1 << 40) - 10))
    far.run(mask_program(CAUSAL, operations(), WIDE_LIMITS), mask=True)
    assert (far.bits() == expected_output(far, CAUSAL)).all()


@pytest.mark.parametrize("name", DTYPES)
def test_a_load_reads_every_type_at_any_rank_and_stride(name: str, level: str) -> None:
    dtype = DTYPES[name]
    generator = torch.Generator().manual_seed(1)
    values = (torch.rand(8, 60, 70, generator=generator) * 250 - 100 * (name != "u8")).to(dtype)
    tables = {
        "whole": values,
        "transposed": values.transpose(1, 2).contiguous().transpose(1, 2),
        "expanded": values[:, :1].expand(8, 60, 70),
        "sliced": values.repeat(1, 1, 2)[..., ::2],
    }
    where = {
        "h,q,k": "load {0} 0,1,2 0",
        "h,q,-k": "neg i64 2 -;load {0} 0,1,4 0",
        "h,q,k-q": "sub i64 2,1 -;load {0} 0,1,4 0",
        "k,q+k,q": "add i64 1,2 -;load {0} 2,4,1 0",
        "h,h,h": "load {0} 0,0,0 0",
    }
    for text in where.values():
        head = "input i64 - h;input i64 - q_idx;input i64 - kv_idx;input f32 - score;"
        steps = text.format(name).count(";")
        nodes = f"{head}{text.format(name)};cast f32 {4 + steps} -;={5 + steps}"
        graph = parse_graph(nodes)
        for way, table in tables.items():
            for columns in (48, 37):
                tile = Tile(30, columns, (0, 3, 4, 9), [table])
                wanted = expected_output(tile, graph)
                tile.run(score_program(graph, operations()))
                assert same(tile.score[:, :columns], wanted).all(), f"{text} {way}"


TABLE = "input i64 - {0};input f32 - score;load f32 0 0;add f32 1,2 -;=3"


@pytest.mark.parametrize("index", ["b", "h", "q_idx", "kv_idx"])
def test_a_read_outside_counts_for_live_pairs_alone(index: str, level: str) -> None:
    graph = parse_graph(TABLE.format(index))
    places = {"b": (7, 0, 0, 0), "h": (0, 7, 0, 0), "q_idx": (0, 0, 3, 0), "kv_idx": (0, 0, 0, 3)}
    place = places[index]
    dead = torch.zeros(4, 20, dtype=torch.bool)
    one = dead.clone()
    one[2, 3] = True
    table = torch.arange(5.0)
    code = score_program(graph, operations())
    for live in (None, dead, one):
        tile = Tile(4, 20, place, [table], live=live)
        tile.score[:] = 0
        tile.run(code)
        places_of = {"b": 7, "h": 7, "q_idx": 5, "kv_idx": 6}
        if live is dead:
            assert tile.error.code == OK
        else:
            first = {"q_idx": 5, "kv_idx": 5}.get(index, 7)
            assert tile.error.code == READ_OUTSIDE
            assert (tile.error.mod, tile.error.captured, tile.error.dim) == (0, 0, 0)
            assert tile.error.index == (places_of[index] if live is one else first)
        assert (tile.score[:, :20] <= 4).all()


def test_a_mask_that_reads_outside_says_so(level: str) -> None:
    graph = parse_graph("input i64 - kv_idx;input i64 - q_idx;load bool 1,0 0;=2")
    table = torch.ones(9, 12, dtype=torch.bool)
    tile = Tile(9, 12, (0, 0, 0, 0), [table])
    tile.run(mask_program(graph, operations()), mask=True)
    assert tile.error.code == OK
    tile = Tile(9, 13, (0, 0, 0, 0), [table])
    tile.run(mask_program(graph, operations()), mask=True)
    assert (tile.error.code, tile.error.mod, tile.error.dim, tile.error.index) == (1, 1, 1, 12)


def test_a_mask_may_read_outside_where_it_says_false(level: str) -> None:
    graph = parse_graph("input i64 - kv_idx;input i64 - q_idx;load bool 1,0 0;=2")
    table = torch.ones(9, 12, dtype=torch.bool)
    table[:, -1] = False
    tile = Tile(9, 40, (0, 0, 0, 0), [table])
    tile.run(mask_program(graph, operations()), mask=True)
    assert tile.error.code == OK
    table[5, -1] = True
    tile.run(mask_program(graph, operations()), mask=True)
    assert (tile.error.code, tile.error.mod, tile.error.dim, tile.error.index) == (1, 1, 1, 12)


def test_negative_indices_count_from_the_end_and_the_rest_clamps(level: str) -> None:
    graph = parse_graph(
        "input i64 - q_idx;input i64 - kv_idx;sub i64 0,1 -;load f32 2 0;input f32 - score;"
        "add f32 3,4 -;=5"
    )
    tile = Tile(9, 20, captured=[torch.arange(4.0)], live=torch.zeros(9, 20, dtype=torch.bool))
    tile.score[:] = 0
    wanted = expected_output(tile, graph)
    tile.run(score_program(graph, operations()))
    assert same(tile.score[:, :20], wanted).all()


def test_a_tensor_without_elements_reads_zero_and_is_outside(level: str) -> None:
    graph = parse_graph(
        "input i64 - q_idx;input i64 - kv_idx;load f32 0,1 0;input f32 - score;add f32 2,3 -;=4"
    )
    tile = Tile(3, 5, captured=[torch.zeros(4, 0)])
    tile.score[:] = 2
    tile.run(score_program(graph, operations()))
    assert (tile.score[:, :5] == 2).all()
    assert (tile.error.code, tile.error.dim, tile.error.index) == (READ_OUTSIDE, 1, 0)


def test_gradients_of_dead_pairs_stay_out(level: str) -> None:
    graph = simplify(
        parse_graph("input i64 - h;load f32 0 0;input f32 - score;mul f32 1,2 -;exp f32 3 -;=4")
    )
    derivative = differentiate(graph, wanted_captured=frozenset({0}))
    live = random_live(11, 37, 5)
    tile = Tile(11, 37, (0, 2, 0, 0), [torch.rand(4)], live=live)
    tile.score[:, :37] = torch.randn(11, 37)
    tile.grad[:, :37] = torch.randn(11, 37)
    # Any gradient may arrive at a dead pair.
    tile.score[:, :37][~live] = torch.nan
    tile.grad[:, :37][~live] = torch.inf
    score, sums = expected_gradients(tile, derivative, live)
    tile.grad[:, :37][~live] = torch.inf
    found = torch.zeros(4, dtype=torch.float64)
    tile.run(score_backward_program(derivative, operations()), grads=[found])
    torch.testing.assert_close(tile.grad[:, :37], score, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, sums[0], rtol=1e-5, atol=1e-5)
    assert (tile.grad[:, :37][~live] == 0).all()


def test_a_score_without_gradient_gives_zeros(level: str) -> None:
    graph = parse_graph("input i64 - h;load f32 0 0;=1")
    derivative = differentiate(graph, wanted_captured=frozenset({0}))
    assert derivative.score is None
    tile = Tile(4, 20, (0, 1, 0, 0), [torch.rand(3)])
    tile.score[:] = 0
    tile.grad[:, :20] = 1
    found = torch.zeros(3, dtype=torch.float64)
    tile.run(score_backward_program(derivative, operations()), grads=[found])
    assert (tile.grad[:, :20] == 0).all()
    assert found.tolist() == [0, 80, 0]


def test_equal_tiles_give_equal_bits(level: str) -> None:
    graph = parse_graph(
        "input i64 - q_idx;input i64 - kv_idx;sub i64 0,1 -;load f32 2 0;input f32 - score;"
        "mul f32 3,4 -;=5"
    )
    derivative = differentiate(graph, wanted_captured=frozenset({0}))
    code = score_backward_program(derivative, operations())
    sums = []
    for _ in range(2):
        tile = Tile(40, 130, captured=[torch.linspace(-1, 1, 300)])
        generator = torch.Generator().manual_seed(0)
        tile.score.normal_(generator=generator)
        tile.grad.normal_(generator=generator)
        found = torch.zeros(300, dtype=torch.float64)
        tile.run(code, grads=[found])
        sums.append((found, tile.grad[:, :130].clone()))
    assert all(torch.equal(x, y) for x, y in zip(*sums, strict=True))


def test_a_scatter_of_one_value_a_row_adds_it_for_each_live_pair(level: str) -> None:
    nodes = (
        Node("input", I64, (), "q_idx"),
        Node("load", torch.float32, (0,), 0),
        Node("input", I64, (), "kv_idx"),
    )
    derivative = Derivative(nodes, None, (Scatter(1, (2,), 1),))
    live = random_live(12, 30, 3)
    tables = [torch.rand(12), torch.zeros(30)]
    tile = Tile(12, 30, captured=tables, live=live)
    found = torch.zeros(30, dtype=torch.float64)
    tile.run(score_backward_program(derivative, operations()), grads=[None, found])
    torch.testing.assert_close(found, (tables[0][:, None] * live).double().sum(0))
