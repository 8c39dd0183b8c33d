"""A printed graph reads like its mod; closed-over numbers are no part of its structure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from anyflex.mod_graph.graph import ModGraph, parse_graph
from anyflex.mod_graph.printing import expression
from anyflex.mod_graph.simplify import simplify
from anyflex.tracing.trace import trace_mod

__all__: list[str] = []


def graph_of(mod: Callable[..., Any], kind: Any = "score") -> ModGraph:
    return simplify(parse_graph(trace_mod(mod, kind).text))


def test_a_score_mod_is_printed() -> None:
    slope, cap = torch.randn(4), 20.0

    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        biased = score + slope[h] * (kv_idx - q_idx)
        return cap * torch.tanh(biased / cap)

    assert str(graph_of(capped)) == (
        "v0: f32 = captured0[h]\n"
        "v1: i64 = kv_idx - q_idx\n"
        "v2: f32 = f32(v1)\n"
        "v3: f32 = v0 * v2\n"
        "v4: f32 = score + v3\n"
        "v5: f32 = v4 / f0\n"
        "v6: f32 = tanh(v5)\n"
        "v7: f32 = f1 * v6\n"
        "return v7"
    )


def test_a_mask_mod_is_printed() -> None:
    document, window = torch.zeros(64, dtype=torch.int32), 8

    def packed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near = (q_idx - kv_idx).abs() <= window
        return (document[q_idx] == document[kv_idx]) & near & ~(kv_idx % 4 == 3)

    assert str(graph_of(packed, "mask")) == (
        "v0: i64 = q_idx - kv_idx\n"
        "v1: i64 = abs(v0)\n"
        "v2: bool = v1 <= i0\n"
        "v3: i32 = captured0[q_idx]\n"
        "v4: i32 = captured0[kv_idx]\n"
        "v5: bool = v3 == v4\n"
        "v6: bool = v5 & v2\n"
        "v7: i64 = kv_idx % i1\n"
        "v8: bool = v7 == i2\n"
        "v9: bool = ~v8\n"
        "v10: bool = v6 & v9\n"
        "return v10"
    )


def test_reads_of_reads_and_numbers_bound_as_constants_are_printed() -> None:
    table, bucket = torch.randn(8, 4), torch.zeros(16, dtype=torch.int16)
    scale = torch.tensor(0.5)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        read = table[bucket[q_idx - 3].long(), h]
        return torch.where(score > 0, torch.maximum(score * scale, read), float("-inf"))

    graph = simplify(graph_of(mod).bind(constants={"i0": 3, "i1": 0, "f0": -math.inf}))
    assert str(graph) == (
        "v0: i64 = q_idx - 3\n"
        "v1: i16 = captured0[v0]\n"
        "v2: i64 = i64(v1)\n"
        "v3: f32 = captured1[v2, h]\n"
        "v4: bool = score > 0.0\n"
        "v5: f32 = score * captured2\n"
        "v6: f32 = maximum(v5, v3)\n"
        "v7: f32 = where(v4, v6, -inf)\n"
        "return v7"
    )


def test_what_only_reads_an_input_is_one_line() -> None:
    assert str(graph_of(lambda s, b, h, q, k: s)) == "return score"


def test_mods_that_differ_in_closed_over_numbers_share_one_structure() -> None:
    def made(width: int, scale: float, shift: float) -> Callable[..., Any]:
        table = torch.full((16,), shift)
        return lambda s, b, h, q, k: torch.where(
            (q - k).abs() < width, s * scale + table[k], s - shift
        )

    first = trace_mod(made(3, 0.5, 1.0), "score")
    second = trace_mod(made(7, -0.0, math.inf), "score")
    assert first.text == second.text
    assert parse_graph(first.text) == parse_graph(second.text)
    assert str(parse_graph(first.text)) == str(parse_graph(second.text))
    assert (first.ints, first.floats) == ([3], [0.5, 1.0])
    assert (second.ints, second.floats) == ([7], [-0.0, math.inf])


def test_one_value_is_an_expression_with_the_names_of_what_it_reads() -> None:
    doc = torch.zeros(8, dtype=torch.int64)
    traced = trace_mod(lambda b, h, q, k: (doc[q // 2] == -doc[k]) & (q * (k + 3) > 5), "mask")
    graph = parse_graph(traced.text).bind(constants={"i0": 2, "i1": 3, "i2": 5})
    text = expression(graph.nodes, graph.output, ["doc" for _ in traced.captured])
    assert text == "(doc[q_idx // 2] == -doc[kv_idx]) & ((q_idx * (kv_idx + 3)) > 5)"


def test_a_long_expression_is_cut_off() -> None:
    def doubled(b, h, q, k):
        for _ in range(60):
            q = q * q
        return q > k

    traced = trace_mod(doubled, "mask")
    graph = parse_graph(traced.text)
    text = expression(graph.nodes, graph.output, traced.names)
    assert len(text) == 200 and text.endswith("...")
