"""Each accepted spelling has torch's value, type and gradient."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from anyflex.mod_graph.evaluate import evaluate
from anyflex.mod_graph.graph import parse_graph
from anyflex.mod_graph.simplify import simplify
from anyflex.tracing.trace import trace_mod
from tests.spellings.accepted import ACCEPTED, COUNT, Spelling
from tests.spellings.surroundings import (
    function_of,
    one_by_one,
    pairs,
    tables,
    traced_gradients,
)

__all__: list[str] = []

ROUGH = {"F.celu(s)", "F.hardsigmoid(s)"}
"""torch's own gradients hold constants in float32."""

NO_DERIVATIVE = {"s // 0.5", "torch.heaviside(s, s * 0)"}
"""torch refuses to differentiate them; here the derivative is 0, as of all rounding operations."""


def test_the_list_is_complete() -> None:
    assert [spelling.number for spelling in ACCEPTED] == list(range(1, COUNT + 1))
    assert len({spelling.expression for spelling in ACCEPTED}) == COUNT


def by_torch(expression: str) -> str:
    """The expression for torch, which takes no int16 index."""
    return expression.replace("w[i16[k]]", "w[i16[k].long()]")


def defined(expression: str, score: Tensor) -> Tensor:
    """Where the value is specified: casts to int are for finite values alone."""
    to_int = re.search(r"s\.(int|long)\(\)", expression)
    return score.isfinite() if to_int else torch.ones_like(score, dtype=torch.bool)


@pytest.mark.parametrize("spelling", ACCEPTED, ids=str)
def test_value_and_type_are_those_of_torch(spelling: Spelling) -> None:
    captured, given = tables(torch.float32), pairs(torch.float32)
    indices = {name: given[name].int() for name in ("q_idx", "kv_idx")}
    reference = function_of(by_torch(spelling.expression), captured)
    rows = one_by_one(reference, {**given, **indices})
    assert {str(row.dtype) for row in rows} == {f"torch.{spelling.result}"}
    wanted = torch.stack(rows).double()

    found_types = []
    function = function_of(spelling.expression, captured)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        value = function(s, b, h, q.int(), k.int())
        found_types.append(value.dtype)
        return value.double()

    traced = trace_mod(mod, "score")
    assert [str(dtype) for dtype in found_types] == [f"torch.{spelling.result}"]
    graph = parse_graph(traced.text)
    where = defined(spelling.expression, given["score"])
    for variant in (graph, simplify(graph)):
        (found,) = evaluate(
            variant.nodes,
            (variant.output,),
            inputs=given,
            captured=traced.captured,
            ints=traced.ints,
            floats=traced.floats,
        )
        found = found.expand(len(rows)).float()
        # The last bits of float32 are those of a formula; all else is exact.
        torch.testing.assert_close(
            found[where], wanted.float()[where], rtol=2e-6, atol=1e-7, equal_nan=True
        )


def in_float64(expression: str) -> str:
    return expression.replace("float32", "float64").replace(".float()", ".double()")


@pytest.mark.usefixtures("float64_numbers")
@pytest.mark.parametrize("spelling", ACCEPTED, ids=str)
def test_the_gradient_is_that_of_autograd(spelling: Spelling) -> None:
    expression = in_float64(spelling.expression)
    captured, given = tables(torch.float64, learned=True), pairs(torch.float64)
    some = given["score"].isfinite()
    # The sign of an infinite slope at -0.0 depends on how torch computes it.
    some &= ~((given["score"] == 0) & torch.signbit(given["score"]))
    given = {name: value[some] for name, value in given.items()}
    score = given["score"].clone().requires_grad_()
    reference = function_of(by_torch(expression), captured)
    rows = one_by_one(reference, {**given, "score": score})
    if not rows[0].is_floating_point():
        return
    # Where the value is NaN, its gradient isn't compared.
    weights = torch.linspace(0.5, 1.5, len(rows))
    weights = torch.where(torch.stack(rows).detach().double().isnan(), 0.0, weights)
    leaves = [tensor for tensor in captured.values() if getattr(tensor, "requires_grad", False)]
    wanted: Any = [None] * (1 + len(leaves))
    if any(row.requires_grad for row in rows) and spelling.expression not in NO_DERIVATIVE:
        total = (torch.stack(rows).double() * weights).sum()
        wanted = torch.autograd.grad(total, [score, *leaves], allow_unused=True)

    traced = trace_mod(function_of(expression, captured), "score", torch.float64)
    graph = parse_graph(traced.text)
    found, sums, _ = traced_gradients(traced, graph, given, weights)
    close = {"rtol": 1e-7, "atol": 1e-7} if expression in ROUGH else {"rtol": 1e-10, "atol": 1e-11}
    number = weights != 0.0
    wanted_score = torch.zeros_like(score) if wanted[0] is None else wanted[0]
    torch.testing.assert_close(found[number], wanted_score[number], equal_nan=True, **close)
    for leaf, gradient in zip(leaves, wanted[1:], strict=True):
        total = torch.zeros_like(leaf)
        for i, tensor in enumerate(traced.captured):
            if i in sums:
                (part,) = torch.autograd.grad(tensor, leaf, sums[i], allow_unused=True)
                total = total if part is None else total + part
        torch.testing.assert_close(
            total, torch.zeros_like(leaf) if gradient is None else gradient, **close
        )
