"""Reads of captured tensors, and the gradients that come back to them."""

from __future__ import annotations

import math

import pytest
import torch
from tile_case import Case, M, N
from torch import Tensor

from anyflex.plugin import ModGraph, differentiate, parse_graph, simplify

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}
INDEX = "input f32 - score;input i64 - b;input i64 - h;input i64 - q_idx;input i64 - kv_idx"


def guarded(tensor: Tensor) -> Tensor:
    """Return the same values, with NaN around them and between them where it has strides."""
    around = torch.full((tensor.numel() * 2 + 64,), math.nan, dtype=tensor.dtype)
    strides = [2 * stride for stride in tensor.contiguous().stride()]
    view = around.as_strided(tensor.shape, strides, 32)
    return view.copy_(tensor)


def test_an_index_wraps_once_then_clamps() -> None:
    # table[q - k, h - 5, kv * 3 - 40]: all ways out.
    graph = parse_graph(
        f"{INDEX};sub i64 3,4 -;const i64 - 5;sub i64 2,6 -;const i64 - 3;mul i64 4,8 -;"
        "const i64 - 40;sub i64 9,10 -;load f32 5,7,11 0;add f32 0,12 -;=13"
    )
    for shape in ((7, 3, 20), (1, 1, 1), (40, 9, 60)):
        case = Case(graph, captured=[guarded(torch.randn(shape))], h=2, first_q=3)
        assert torch.equal(case.run("score_mod", "score"), case.value(graph))


@pytest.mark.parametrize("index", ["i8", "i16", "u8", "i32", "i64"])
def test_an_index_may_be_of_any_integer_type_and_beyond_its_tensor(index: str) -> None:
    dtype = {"i8": torch.int8, "i16": torch.int16, "u8": torch.uint8, "i32": torch.int32}
    places = torch.tensor([0, 5, -1, 100, -7, -8, -9, 127, -128])
    if index == "i64":
        places = torch.cat([places, torch.tensor([1 << 40, -(1 << 40), (1 << 63) - 1, 1 << 32])])
    table = torch.randn(7)
    where = places.repeat(8)[:N].to(dtype.get(index, torch.int64))
    graph = parse_graph(f"{INDEX};load {index} 4 0;load f32 5 1;add f32 0,6 -;=7")
    case = Case(graph, captured=[where, guarded(table)])
    assert torch.equal(case.run("score_mod", "score"), case.value(graph))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_an_empty_tensor_reads_as_0_and_gets_nothing(shape: tuple[int, ...]) -> None:
    indices = ",".join("34"[: len(shape)])
    graph = parse_graph(f"{INDEX};load f32 {indices} 0;add f32 0,5 -;=6")
    table = torch.empty(shape)
    case = Case(graph, captured=[table], learned=[0])
    assert torch.equal(case.run("score_mod", "score"), case.score)
    case.run("captured_gradients", "captured", (torch.zeros(shape),))


def test_tensors_without_dimensions_and_with_strides_are_read() -> None:
    graph = parse_graph(f"{INDEX};load f32 - 0;load f32 3,4 1;mul f32 5,6 -;mul f32 0,7 -;=8")
    tables = [
        torch.randn(N, M).t(),
        torch.randn(M, 1).expand(M, N),
        torch.randn(2 * M, 3 * N)[::2, ::3],
        torch.randn(1, N).expand(M, N),
    ]
    for table in tables:
        case = Case(graph, captured=[torch.tensor(1.5), table])
        assert torch.equal(case.run("score_mod", "score"), case.value(graph))


def test_bools_and_bytes_are_read() -> None:
    graph = parse_graph(f"{INDEX};load bool 4 0;load u8 3 1;cast f32 6 -;where f32 5,0,7 -;=8")
    flags, levels = torch.rand(N) < 0.5, torch.randint(0, 256, (M,), dtype=torch.uint8)
    case = Case(graph, captured=[flags, levels])
    assert torch.equal(case.run("score_mod", "score"), case.value(graph))


def test_numbers_come_from_the_call() -> None:
    graph = parse_graph(
        "input f32 - score;number f32 - f1;mul f32 0,1 -;number i64 - i0;cast f32 3 -;"
        "add f32 2,4 -;number bf16 - f0;cast f32 6 -;add f32 5,7 -;load f32 - 0;add f32 8,9 -;=10"
    )
    for number in (1, 16, -7, 1 << 40):
        case = Case(graph, captured=[torch.tensor(0.5)], ints=[number], floats=[0.1, 2.5])
        torch.testing.assert_close(case.run("score_mod", "score"), case.value(graph))


READS = {
    # Each case has the index and the shape of the table; gradients are summed over the tile, over
    # keys, over queries, or not at all.
    "tile": ("2", (5,)),
    "row": ("3", (M,)),
    "column": ("4", (N,)),
    "row of a head": ("2,3", (5, M)),
    "column of a batch and a head": ("1,2,4", (2, 5, N)),
    "pair": ("3,4", (M, N)),
    "distance": ("5", (M + N,)),
    "colliding": ("7", (2,)),
    "clamped": ("5,3", (3, 4)),
    "one bucket": ("10", (3,)),
    "one bucket of a head": ("2,10", (5, 1)),
    "nothing": ("-", ()),
}
LEARNED = (
    "sub i64 3,4 -;const i64 - 2;mod i64 3,6 -;add i64 3,4 -;const i64 - 4096;floordiv i64 8,9 -"
)


def gradients_of(case: Case, graph: ModGraph) -> list[Tensor]:
    """Return gradients of live pairs in float64, by index_put with accumulation."""
    slope = differentiate(simplify(graph), wanted_captured=frozenset(case.learned))
    totals = [torch.zeros(case.captured[i].shape, dtype=torch.float64) for i in case.learned]
    for scatter in slope.scatters:
        value, *indices = case.evaluated(slope.nodes, [scatter.value, *scatter.indices])
        added = torch.where(case.live, value.double().expand(M, N), 0.0)
        total = totals[case.learned.index(scatter.captured)]
        places = []
        for index, size in zip(indices, total.shape, strict=True):
            wrapped = torch.where(index < 0, index + size, index).clamp(0, size - 1)
            places.append(wrapped.expand(M, N))
        if places:
            total.index_put_(tuple(places), added, accumulate=True)
        else:
            total += added.sum()
    return totals


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("read", READS)
def test_gradients_of_captured_tensors_are_sums_over_live_pairs(
    read: str, name: str, rows: bool, transposed: bool
) -> None:
    indices, shape = READS[read]
    # sigmoid(table[...]) * score + table[...]
    graph = parse_graph(
        f"{INDEX};{LEARNED};load {name} {indices} 0;cast f32 11 -;sigmoid f32 12 -;"
        "mul f32 0,13 -;add f32 14,12 -;=15"
    )
    torch.manual_seed(7)
    table = torch.randn(shape).to(TYPES[name])
    case = Case(graph, captured=[table], learned=[0], b=1, h=2, rows=rows, transposed=transposed)
    # Dead pairs pass nothing, whatever they hold.
    case.grad = torch.where(case.live, case.grad, math.nan)
    total = torch.zeros(shape)
    case.run("captured_gradients", "captured", (total,))
    (wanted,) = gradients_of(case, graph)
    scale = wanted.abs().max().item()
    torch.testing.assert_close(total.double(), wanted, rtol=2e-6, atol=2e-6 * max(scale, 1.0))


def test_only_what_learns_has_a_total_and_they_stand_in_order() -> None:
    graph = parse_graph(
        f"{INDEX};load f32 3 0;load f32 4 1;load f32 3,4 2;mul f32 5,6 -;mul f32 8,7 -;"
        "add f32 0,9 -;=10"
    )
    torch.manual_seed(8)
    tables = [torch.randn(M), torch.randn(N), torch.randn(M, N), torch.randn(3)]
    case = Case(graph, captured=tables, learned=[0, 2, 3])
    totals = (torch.ones(M), torch.zeros(M, N), torch.zeros(3, dtype=torch.float64))
    case.run("captured_gradients", "captured", totals)
    wanted = gradients_of(case, graph)
    # The total keeps what it held before.
    torch.testing.assert_close(totals[0].double() - 1, wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(totals[1].double(), wanted[1], rtol=1e-5, atol=1e-5)
    assert totals[2].count_nonzero() == 0


def test_nan_of_a_live_pair_reaches_the_total() -> None:
    graph = parse_graph(f"{INDEX};load f32 3 0;mul f32 0,5 -;=6")
    case = Case(graph, captured=[torch.randn(M)], learned=[0])
    case.live[3, 4] = True
    case.score[3, 4] = math.nan
    total = torch.zeros(M)
    case.run("captured_gradients", "captured", (total,))
    assert total.isnan().nonzero().flatten().tolist() == [3]
