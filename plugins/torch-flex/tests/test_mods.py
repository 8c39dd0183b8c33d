"""Mods as source text."""

from __future__ import annotations

import torch
from anyflex_torch_flex.mods import TORCH_FLEX, load_source, write_source

from anyflex.plugin import CapturedFacts, Spec, parse_graph


def test_the_table_lacks_no_operation() -> None:
    assert TORCH_FLEX.missing() == []


def test_a_mod_becomes_a_function_that_reads_its_captured_tensor_within_bounds() -> None:
    # score + table[kv_idx] * f0
    graph = parse_graph(
        "input f32 - score;input i64 - kv_idx;load f32 1 0;number f32 - f0;mul f32 2,3 -;"
        "add f32 0,4 -;=5"
    )
    facts = (CapturedFacts(torch.float32, 1, False),)
    spec = Spec("cpu", "", torch.float32, 16, 16, score_graph=graph, captured=facts)
    make_mods = load_source(write_source(spec))
    table = torch.tensor([1.0, 2.0, 3.0])
    score_mod, mask_mod = make_mods((table,), torch.tensor([0]), torch.tensor([10.0]))
    kv_idx = torch.tensor([-4, -1, 0, 2, 7])
    zero = torch.zeros(5)
    found = score_mod(zero, zero, zero, zero, kv_idx)
    assert found.tolist() == [10.0, 30.0, 10.0, 30.0, 30.0]
    assert mask_mod is None
