"""At an exact tie torch.maximum and minimum halve the gradient, and a clamp follows the torch that
runs, whatever simplifying makes of their operands."""

from __future__ import annotations

import pytest
import torch

from anyflex.mod_graph.graph import parse_graph
from anyflex.mod_graph.simplify import simplify
from anyflex.tracing.trace import trace_mod
from tests.spellings.surroundings import function_of, one_by_one, traced_gradients

__all__: list[str] = []

HALVED = [
    "torch.maximum(s, (b - b) * 0.25)",  # constant once it is simplified
    "torch.minimum((q * 0).double(), s)",
    "torch.maximum(s, torch.sign(b - b) * 0.25 + s * 0.5)",
    "torch.maximum(s, torch.zeros_like(s))",
    "torch.maximum(s, torch.zeros_like(s) + 0)",
    "torch.maximum(torch.tensor(0.0), s)",
    "torch.minimum(s, torch.full_like(q, 0).double())",
    "s.maximum(torch.minimum((h - h) * 1.0, torch.zeros_like(s)))",
]
CLAMPED = [
    "torch.clamp(s, min=0.0)",
    "s.clamp(-0.0, 1)",
    "torch.clamp(s, max=(b - b) * 0.25)",
    "torch.clamp_max(s, 0)",
]


@pytest.mark.usefixtures("float64_numbers")
@pytest.mark.parametrize("expression", [*HALVED, *CLAMPED])
def test_the_gradient_at_a_tie_is_that_of_autograd(expression: str) -> None:
    function = function_of(f"({expression}) * 3.0", {})
    index = torch.arange(5)
    scores = torch.tensor([0.0, 0.0, -1.0, 2.0, 0.0])
    given = {"score": scores.requires_grad_(), "b": index, "h": index, "q_idx": index}
    given["kv_idx"] = index
    rows = one_by_one(function, given)
    (wanted,) = torch.autograd.grad(torch.stack(rows).sum(), [scores])
    if expression in HALVED:
        assert wanted[0] in (1.5, 2.25)
    given["score"] = scores.detach()
    traced = trace_mod(function, "score", torch.float64)
    raw = parse_graph(traced.text)
    constants = {f"i{i}": value for i, value in enumerate(traced.ints)}
    constants |= {f"f{i}": value for i, value in enumerate(traced.floats)}
    bound = simplify(raw.bind(constants=constants))
    for graph in (raw, simplify(raw), bound, simplify(bound)):
        found, _, _ = traced_gradients(traced, graph, given, torch.ones(5))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=f"{expression}\n{graph}")
