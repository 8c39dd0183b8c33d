"""Bytecode of mod graphs: its steps, their sections, and their registers."""

from __future__ import annotations

import struct

import pytest
import torch
from tile_runs import Tile, expected_output, operations, scratch_bytes

from anyflex import masks, mods
from anyflex.plugin import (
    Derivative,
    ModGraph,
    Scatter,
    differentiate,
    parse_graph,
    simplify,
)
from anyflex.tracing.trace import trace_mod
from anyflex_cpu.bytecode import mask_program, score_backward_program, score_program
from anyflex_cpu.index_ranges import LIMITS, WIDE_LIMITS, Limits

__all__: list[str] = []

HEADER = struct.Struct("=10I")
STEP = struct.Struct("=6HI")


def sections(code: bytes) -> list[list[str]]:
    """Names of a program's steps, by section: once a tile, a row, a column, a pair."""
    names = {number: name for name, number in operations().items()}
    _, _, _, steps, *ends, _, _ = HEADER.unpack_from(code)
    found = [names[STEP.unpack_from(code, HEADER.size + 16 * i)[0]] for i in range(steps)]
    return [found[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def slots(code: bytes) -> int:
    return int(HEADER.unpack_from(code)[2])


def mask(text: str, limits: Limits = LIMITS) -> list[list[str]]:
    return sections(mask_program(simplify(parse_graph(text)), operations(), limits))


INDICES = "input i64 - q_idx;input i64 - kv_idx;"


def test_a_causal_mask_is_one_step_a_row() -> None:
    assert mask(INDICES + "ge bool 0,1 -;=2") == [[], ["q_i"], ["kv_i"], ["le_iS"]]


def test_what_may_leave_int32_is_computed_in_int64() -> None:
    wide = mask(INDICES + "ge bool 0,1 -;=2", WIDE_LIMITS)
    assert wide == [[], ["q_l"], ["kv_l"], ["le_lS"]]
    product = INDICES + "const i64 - 1000;mul i64 0,2 -;add i64 3,1 -;const i64 - 9;"
    found = mask(product + "le bool 4,5 -;=6")
    assert found[1] == ["q_i", "i_to_l", "mul_l"]
    assert found[3] == ["add_lS", "le_lS"]


def test_a_window_computes_differences_in_int32() -> None:
    text = INDICES + "ge bool 0,1 -;sub i64 0,1 -;const i64 - 256;le bool 3,4 -;and bool 2,5 -;=6"
    assert mask(text)[3] == ["le_iS", "rsub_iS", "le_iS", "and_p"]


def test_division_by_a_power_of_two_is_a_shift() -> None:
    text = INDICES + "const i64 - 128;floordiv i64 0,2 -;mod i64 1,2 -;eq bool 3,4 -;=5"
    found = mask(text)
    assert found[1:] == [["q_i", "shr_i"], ["kv_i", "and_i"], ["eq_iS"]]
    text = INDICES + "const i64 - 100;floordiv i64 0,2 -;mod i64 1,2 -;eq bool 3,4 -;=5"
    assert mask(text)[1] == ["q_i", "floordiv_i"]


def test_a_mask_of_rows_alone_is_spread() -> None:
    assert mask(INDICES + "const i64 - 5;lt bool 0,2 -;=3")[3] == ["spread_p"]
    assert mask(INDICES + "const i64 - 5;lt bool 1,2 -;=3")[3] == ["copy_p"]


def test_a_score_is_computed_in_its_own_memory() -> None:
    graph = parse_graph("input f32 - score;const f32 - 0.5;mul f32 0,1 -;tanh f32 2 -;=3")
    code = score_program(graph, operations())
    assert sections(code)[3] == ["mul_fS", "tanh_f"]
    assert slots(code) == 2


def test_a_gradient_that_is_read_again_is_written_last() -> None:
    nodes = parse_graph("input f32 - score;input f32 - grad;mul f32 0,1 -;sin f32 1 -;=3").nodes
    early = Derivative(nodes, 2, (Scatter(0, (), 3),))
    assert sections(score_backward_program(early, operations()))[3][-1] == "copy_f"
    late = Derivative(nodes, 3, (Scatter(0, (), 2),))
    steps = sections(score_backward_program(late, operations()))[3]
    assert steps == ["mul_f", "sin_f", "scatter_f"]


def test_registers_are_used_again() -> None:
    lines = ["input f32 - score"]
    for i in range(300):
        lines += [f"sin f32 {2 * i} -", f"cos f32 {2 * i + 1} -"]
    code = score_program(parse_graph(";".join([*lines, f"={len(lines) - 1}"])), operations())
    assert slots(code) <= 2
    assert scratch_bytes(code) < 1 << 18


def test_many_reads_of_the_score_are_no_limit() -> None:
    lines = ["input f32 - score"]
    lines += [f"mul f32 0,{i} -" for i in range(200)]
    graph = parse_graph(";".join([*lines, "=200"]))
    tile = Tile(2, 17)
    tile.score[:, :17] = 1
    tile.run(score_program(graph, operations()))
    assert (tile.score[:, :17] == 1).all()


def test_equal_steps_are_made_once() -> None:
    text = INDICES + "sub i64 0,1 -;abs i64 2 -;load f32 3 0;load f32 3 1;"
    graph = parse_graph(text + "mul f32 4,5 -;input f32 - score;add f32 6,7 -;=8")
    derivative = differentiate(graph, wanted_captured=frozenset({0, 1}))
    steps = sections(score_backward_program(derivative, operations()))[3]
    assert steps.count("abs_i") == 1
    assert [name for name in steps if name.startswith("scatter")] == ["scatter_f", "scatter_f"]


def _bound(function: object, kind: str) -> tuple[ModGraph, list[torch.Tensor]]:
    traced = trace_mod(function, kind)  # type: ignore[arg-type]
    constants: dict[str, float] = {f"i{i}": value for i, value in enumerate(traced.ints)}
    constants |= {f"f{i}": value for i, value in enumerate(traced.floats)}
    return simplify(parse_graph(traced.text).bind(constants=constants)), traced.captured


DOCUMENTS = torch.tensor([0] * 30 + [1] * 50 + [2] * 120)
MASKS = {
    "causal": masks.causal(),
    "sliding window": masks.sliding_window(40),
    "document": masks.document(DOCUMENTS),
    "chunked": masks.chunked(37),
    "block causal": masks.block_causal(16),
    "prefix": masks.prefix_lm(torch.tensor([20, 70])),
    "sinks and window": masks.sinks_and_window(4, 30),
    "neighbourhood": masks.neighbourhood((10, 20), (3, 5)),
    "blocks": lambda b, h, q, kv: (q // 16) % 3 != kv // 7 % 2,
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_at_every_place_is_torchs(name: str, level: str) -> None:
    graph, captured = _bound(MASKS[name], "mask")
    code = mask_program(graph, operations())
    for place in ((0, 0), (64, 0), (0, 64), (100, 90)):
        tile = Tile(50, 70, (1, 2, *place), captured)
        tile.run(code, mask=True)
        assert (tile.bits() == expected_output(tile, graph)).all()


SCORES = {
    "alibi": mods.alibi(8),
    "softcap": mods.softcap(20.0),
    "relative": mods.relative_bias(torch.linspace(-1, 1, 8 * 99).view(99, 8)),
    "t5": mods.t5_bias(torch.linspace(-1, 1, 32 * 8).view(32, 8)),
    "dense": mods.dense_bias(torch.linspace(-1, 1, 2 * 8 * 120 * 120).view(2, 8, 120, 120)),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_score_mod_is_torchs(name: str, level: str) -> None:
    graph, captured = _bound(SCORES[name], "score")
    tile = Tile(50, 70, (1, 2, 64, 30), captured)
    tile.score[:, :70] = torch.randn(50, 70, generator=torch.Generator().manual_seed(0)) * 20
    wanted = expected_output(tile, graph)
    tile.run(score_program(graph, operations()))
    torch.testing.assert_close(tile.score[:, :70], wanted, rtol=1e-6, atol=1e-6)
