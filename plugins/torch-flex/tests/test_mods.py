"""Mods as source text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from anyflex_torch_flex.mods import TORCH_FLEX, load_source, write_source
from torch import Tensor

from anyflex.plugin import CapturedFacts, Spec, parse_graph


def test_the_table_lacks_no_operation() -> None:
    assert TORCH_FLEX.problems() == []


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


def score_mod_of(text: str) -> Callable[..., Tensor]:
    """The score mod of a graph without captured tensors."""
    spec = Spec("cpu", "", torch.float32, 16, 16, score_graph=parse_graph(text))
    score_mod, _ = load_source(write_source(spec))((), torch.tensor([0]), torch.tensor([0.0]))
    assert score_mod is not None
    return score_mod


def test_a_mod_that_ignores_the_score_reads_it_and_passes_nothing_on() -> None:
    # kv_idx * 0.5
    score_mod = score_mod_of("input i64 - kv_idx;cast f32 0 -;const f32 - 0.5;mul f32 1,2 -;=3")
    score = torch.full((3,), torch.nan, requires_grad=True)
    zero = torch.zeros(3, dtype=torch.int64)
    found = score_mod(score, zero, zero, zero, torch.arange(3))
    assert found.tolist() == [0.0, 0.5, 1.0]
    (gradient,) = torch.autograd.grad(found.sum(), score)
    assert gradient.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("exponent", "written"), [(3, "v1 * v1 * v1"), (17, "torch.pow(v1, v2)")])
def test_a_power_of_integers_is_a_product_where_it_is_short(exponent: int, written: str) -> None:
    graph = parse_graph(
        f"input f32 - score;input i64 - kv_idx;const i64 - {exponent};pow i64 1,2 -;"
        "cast f32 3 -;add f32 0,4 -;=5"
    )
    text = write_source(Spec("cpu", "", torch.float32, 16, 16, score_graph=graph))
    assert written in text
    make_mods = load_source(text)
    score_mod, _ = make_mods((), torch.tensor([0]), torch.tensor([0.0]))
    assert score_mod is not None
    zero = torch.zeros(3, dtype=torch.int64)
    kv_idx = torch.tensor([-2, 0, 1])
    found = score_mod(zero.float(), zero, zero, zero, kv_idx)
    assert found.tolist() == [float((-2) ** exponent), 0.0, 1.0]
