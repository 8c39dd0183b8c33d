"""Every mod of core's lists, traced, on tiles: values and slopes against core's evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tile_case import Case, M, N

from anyflex.plugin import differentiate, parse_graph, simplify
from anyflex.testing.mods.kit_mods import KIT_MASKS, KIT_MODS
from anyflex.testing.mods.leaves import Sizes
from anyflex.testing.mods.mask_mods import MASK_MODS
from anyflex.testing.mods.mod import Entry
from anyflex.testing.mods.operation_mods import OPERATION_MODS
from anyflex.testing.mods.score_mods import SCORE_MODS
from anyflex.tracing.trace import trace_mod

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZES = Sizes(2, 4, 2, 48, 80)
SCORES = {**SCORE_MODS, **KIT_MODS, **OPERATION_MODS}
MASKS = {**MASK_MODS, **KIT_MASKS}
TILES = [
    {"b": 1, "h": 2, "first_q": 16, "first_k": 32},
    {"b": 0, "h": 1, "first_q": 40, "first_k": 8, "transposed": True},
    {"b": 1, "h": 0, "first_q": 0, "first_k": 0, "rows": True},
]


def case_of(entry: Entry, kind: str, tile: dict[str, int | bool]) -> Case:
    mod = entry.make(SIZES, torch.Generator().manual_seed(3))
    traced = trace_mod(mod.function(), kind)  # type: ignore[arg-type]
    graph = simplify(parse_graph(traced.text))
    return Case(
        graph if kind == "score" else None,
        graph if kind == "mask" else None,
        traced.captured,
        [i for i, tensor in enumerate(traced.captured) if tensor.requires_grad],
        traced.ints,
        traced.floats,
        **tile,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_mod_keeps_what_core_keeps(name: str) -> None:
    for tile in TILES:
        case = case_of(MASKS[name], "mask", tile)
        assert case.spec.mask_graph is not None
        found = case.run("mask_mod", "mask")
        assert torch.equal(found.bool(), case.value(case.spec.mask_graph).bool())


def reads_of(source: str) -> dict[str, int]:
    """Return the number of reads of each function of a module."""
    functions = source.split("def ")[1:]
    return {text.split("(")[0]: text.count("load_once") for text in functions}


def listed_with_early_reads() -> list[tuple[str, str]]:
    return [
        (name, kind)
        for kind, entries in (("mask", MASKS), ("score", SCORES))
        for name, entry in entries.items()
        if f"def {kind}_mod_of_read" in case_of(entry, kind, TILES[0]).source
    ]


@pytest.mark.parametrize(("name", "kind"), listed_with_early_reads())
def test_what_rows_and_columns_alone_decide_may_be_read_before(name: str, kind: str) -> None:
    for tile in (*TILES[:2], {"b": 0, "h": 0, "first_q": 0, "first_k": 0}):
        case = case_of((MASKS if kind == "mask" else SCORES)[name], kind, tile)
        function = f"{kind}_mod"
        found = case.run(f"{function}_of_read", kind)
        assert torch.equal(found.nan_to_num(7), case.run(function, kind).nan_to_num(7))


def test_what_only_a_column_needs_takes_no_row_s_place() -> None:
    generator = torch.Generator().manual_seed(3)
    orders = [torch.randperm(4, generator=generator) for _ in range(5)]
    table, bias = torch.randn(4, 80, generator=generator), torch.randn(48, generator=generator)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for order in orders[:4]:
            s = s + table[order[h], k]
        # A pair needs the last order too.
        last = orders[4][h]
        return s * last + table[last, k] + bias[q]

    traced = trace_mod(mod, "score")
    graph = simplify(parse_graph(traced.text))
    for tile in TILES[:2]:
        case = Case(graph, captured=traced.captured, **tile)  # type: ignore[arg-type]
        reads = reads_of(case.source)
        # The last order and the bias have a place each, and so have four of the five columns'.
        assert reads["read_rows"] == 2 and reads["read_columns"] == 8
        assert reads["score_mod_of_read"] == 2
        assert torch.equal(case.run("score_mod_of_read", "score"), case.run("score_mod", "score"))


def test_documents_are_read_by_row_and_by_column_and_nowhere_else() -> None:
    reads = reads_of(case_of(MASKS["doc_sorted"], "mask", TILES[0]).source)
    assert reads == {"mask_mod": 2, "read_rows": 1, "read_columns": 1, "mask_mod_of_read": 0}


def test_what_is_added_to_a_score_has_no_slope_and_a_distance_no_conversion_a_pair() -> None:
    graph = parse_graph(
        "input f32 - score;input i64 - q_idx;input i64 - kv_idx;sub i64 2,1 -;cast f32 3 -;"
        "add f32 0,4 -;=5"
    )
    case = Case(graph, **TILES[0])  # type: ignore[arg-type]
    assert "def score_mod_backward" not in case.source
    assert "tl.cast(kv_idx, tl.float32) - tl.cast(q_idx, tl.float32) if SHORT" in case.source
    for short in (False, True):
        assert torch.equal(case.run("score_mod", "score", short=short), case.value(graph))


def test_the_slope_of_a_soft_cap_takes_the_cap_neither_as_factor_nor_as_divisor() -> None:
    graph = parse_graph(
        "input f32 - score;const f32 - 30.0;truediv f32 0,1 -;tanh f32 2 -;mul f32 1,3 -;=4"
    )
    case = Case(graph, **TILES[0])  # type: ignore[arg-type]
    slope = case.source.split("def score_mod_backward")[1]
    _before, returned = slope.split("return ops.spread(")
    name = returned.split(",")[0]
    (product,) = (line.strip() for line in slope.splitlines() if f" {name} = " in line)
    assert f"{name} = v5 * v10" == product and "v5 = tl.cast(grad" in slope
    found = case.run("score_mod_backward", "backward")
    wanted = case.grad * (1 - torch.tanh(case.score / 30) ** 2)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("number", [0.0, float("inf")])
def test_what_is_multiplied_and_divided_by_zero_or_infinity_is_not_a_number(number: float) -> None:
    caps = torch.tensor([number, 1.0])
    traced = trace_mod(lambda s, b, h, q, k: caps[0] * s / caps[0], "score")
    case = Case(simplify(parse_graph(traced.text)), captured=traced.captured, **TILES[0])  # type: ignore[arg-type]
    assert case.run("score_mod", "score").isnan().all()
    graph = parse_graph(
        f"input f32 - score;const f32 - {number};mul f32 0,1 -;truediv f32 2,1 -;=3"
    )
    assert Case(graph, **TILES[0]).run("score_mod", "score").isnan().all()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SCORES)
def test_a_score_mod_and_its_slope_are_core_s(name: str) -> None:
    for tile in TILES:
        case = case_of(SCORES[name], "score", tile)
        graph = case.spec.score_graph
        assert graph is not None
        with torch.no_grad():
            near = {"rtol": 4e-6, "atol": 2e-6, "equal_nan": True}
            for short in (False, True):
                found = case.run("score_mod", "score", short=short)
                torch.testing.assert_close(found, case.value(graph).float(), **near)
            slope = differentiate(graph, wanted_captured=frozenset(case.learned))
            wanted = torch.zeros(M, N)
            if slope.score is not None:
                (wanted,) = case.evaluated(slope.nodes, [slope.score])
            if "def score_mod_backward" in case.source:
                found = case.run("score_mod_backward", "backward")
            else:
                found = case.grad
            torch.testing.assert_close(found, wanted.expand(M, N).float(), **near)
            totals = tuple(torch.zeros(case.captured[i].shape) for i in case.learned)
            if totals:
                case.run("captured_gradients", "captured", totals)
                assert all(total.isfinite().all() for total in totals)
