"""Which integers fit 32 bits: proven by ranges, never by hope."""

from __future__ import annotations

import random

import pytest
import torch

from anyflex.intervals.analysis import Analysis
from anyflex.intervals.evaluation import Domain
from anyflex.intervals.index_width import int32_nodes
from anyflex.mod_graph.evaluate import evaluate
from anyflex.mod_graph.graph import ModGraph, parse_graph
from anyflex.tracing.trace import trace_mod
from tests.intervals.expressions import Operands

__all__: list[str] = []


def graph_of(function, kind="mask"):
    traced = trace_mod(function, kind)
    numbers = {f"i{i}": n for i, n in enumerate(traced.ints)}
    return parse_graph(traced.text).bind(constants=numbers), traced.captured


def names_of(graph: ModGraph, positions: frozenset[int]) -> set[str]:
    return {graph.nodes[p].operation for p in positions}


@pytest.mark.parametrize(("length", "fits"), [(46_000, True), (46_341, False), (1 << 20, False)])
def test_a_flattened_index_fits_up_to_46340_tokens(length: int, fits: bool) -> None:
    graph, captured = graph_of(lambda b, h, q, k: (q * length + k) % 7 == 0)
    found = int32_nodes(graph, captured, Domain(1, 1, (length, length), (128, 128)))
    assert ("add" in names_of(graph, found)) == fits
    assert "mod" in names_of(graph, found)  # a remainder is small whatever it is of


def test_values_of_captured_tensors_count() -> None:
    small, large = torch.tensor([3, 1 << 20]), torch.tensor([3, 1 << 40])
    domain = Domain(1, 1, (2, 2), (128, 128))
    graph, captured = graph_of(lambda b, h, q, k: small[q] == k)
    assert "load" in names_of(graph, int32_nodes(graph, captured, domain))
    graph, captured = graph_of(lambda b, h, q, k: large[q] == k)
    assert "load" not in names_of(graph, int32_nodes(graph, captured, domain))


def test_a_score_mod_has_indices_too() -> None:
    graph, captured = graph_of(lambda s, b, h, q, k: s + (q - k) * 0.5, "score")
    found = int32_nodes(graph, captured, Domain(1, 1, (1 << 20, 1 << 20), (128, 128)))
    assert "sub" in names_of(graph, found)


def test_what_may_wrap_is_unknown() -> None:
    huge = 1 << 62
    graph, captured = graph_of(lambda b, h, q, k: q * huge + k * huge > 0)
    analysis = Analysis(graph, captured, Domain(1, 1, (9, 9), (128, 128)))
    for position, node in enumerate(graph.nodes):
        if node.operation in ("mul", "add"):
            assert analysis.range(position) is None


@pytest.mark.parametrize("seed", range(40))
def test_the_bounds_hold_for_all_indices(seed: int) -> None:
    make = Operands(seed)
    chosen = random.Random(seed).choice(("add", "mul", "floordiv", "minimum", "xor"))
    expression = make.expression(chosen, torch.int64, (make.integer(), make.integer()))
    domain = Domain(2, 3, (96, 80), (16, 16))
    analysis = Analysis(expression.graph, expression.captured, domain)
    inputs = {
        "b": torch.arange(2)[:, None, None, None], "h": torch.arange(3)[:, None, None],
        "q_idx": torch.arange(96)[:, None], "kv_idx": torch.arange(80),
    }  # fmt: skip
    positions = range(len(expression.graph.nodes))
    values = evaluate(
        expression.graph.nodes, tuple(positions), inputs=inputs, captured=expression.captured,
        ints=(), floats=(),
    )  # fmt: skip
    for position, value in zip(positions, values, strict=True):
        found = analysis.range(position)
        if found is not None:
            assert found.low <= int(value.min()) and int(value.max()) <= found.high
