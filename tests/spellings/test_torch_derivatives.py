"""Derivatives at bounds and ties follow the release of torch: the values of each release, and that
graphs are differentiated so under each."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from anyflex.mod_graph import torch_derivatives
from anyflex.mod_graph.graph import parse_graph
from anyflex.tracing.trace import trace_mod
from tests.soak import SOAK
from tests.spellings.surroundings import function_of, traced_gradients

__all__: list[str] = []

NAN = float("nan")
Expected = tuple[float, float]
FACTS: list[tuple[str, float, float, Expected, Expected]] = [
    # expression of s and the captured t, s, t, gradients of (s, t) before torch 2.14 and since
    ("s.clamp(-1, 1)", 1.0, 0.0, (1, 0), (0, 0)),
    ("s.clamp(-1, 1)", -1.0, 0.0, (1, 0), (0, 0)),
    ("s.clamp(-1, 1)", 0.5, 0.0, (1, 0), (1, 0)),
    ("s.clamp(-1, 1)", NAN, 0.0, (0, 0), (0, 0)),
    ("s.clamp(1.0, 1.0)", 1.0, 0.0, (1, 0), (0, 0)),
    ("s.clip(min=1)", 1.0, 0.0, (1, 0), (0, 0)),
    ("torch.clamp_min(s, 0.0)", -0.0, 0.0, (1, 0), (0, 0)),
    ("torch.clamp_max(s, float('inf'))", float("inf"), 0.0, (1, 0), (0, 0)),
    ("s.clamp(min=t)", 2.0, 2.0, (1, 0), (0.5, 0.5)),
    ("s.clamp(max=t)", 2.0, 2.0, (1, 0), (0.5, 0.5)),
    ("s.clamp(min=t)", NAN, 2.0, (0, 0), (1, 1)),
    ("s.clamp(t, t + 1)", 2.0, 2.0, (1, 0), (0.5, 0.5)),
    ("s.clamp(t - 1, t)", 2.0, 2.0, (1, 0), (0.5, 0.5)),
    ("s.clamp(t - 1, t)", NAN, 2.0, (0, 0), (1, 0)),
    ("s.clamp(t, t * 1.0)", 1.0, 2.0, (0, 0), (0, 1)),
    ("s.clamp(t, t * 1.0)", 2.0, 2.0, (1, 0), (1, 0)),
    ("s.clamp(t, t - 1)", 1.0, 2.0, (0, 1), (0, 1)),
    ("torch.fmax(s, t)", 2.0, 2.0, (1, 0), (0.5, 0.5)),
    ("torch.fmin(t, s)", 2.0, 2.0, (0, 1), (0.5, 0.5)),
    ("torch.fmax(s, t)", 3.0, 2.0, (1, 0), (1, 0)),
    ("torch.maximum(s, t)", 2.0, 2.0, (0.5, 0.5), (0.5, 0.5)),
    ("torch.minimum(s, t)", NAN, 2.0, (1, 1), (1, 1)),
    ("F.hardtanh(s)", 1.0, 0.0, (0, 0), (0, 0)),
    ("F.relu6(s)", 6.0, 0.0, (0, 0), (0, 0)),
    ("F.relu(s)", 0.0, 0.0, (0, 0), (0, 0)),
    ("F.threshold(s, 1.0, 0.0)", 1.0, 0.0, (0, 0), (0, 0)),
    ("F.leaky_relu(s, 0.25)", 0.0, 0.0, (0.25, 0), (0.25, 0)),
    ("F.hardsigmoid(s)", 3.0, 0.0, (0, 0), (0, 0)),
    ("F.hardswish(s)", -3.0, 0.0, (0, 0), (0, 0)),
    ("torch.abs(s)", 0.0, 0.0, (0, 0), (0, 0)),
    ("torch.logit(s, 0.25)", 0.25, 0.0, (16 / 3, 0), (16 / 3, 0)),
]
SINCE_2_14 = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


def by_graphs() -> list[list[float]]:
    """Gradients of (s, t) by the derivative of each fact's graph."""
    results = []
    index = torch.zeros(1, dtype=torch.int64)
    for expression, s, t, *_ in FACTS:
        captured = torch.tensor(t, dtype=torch.float64, requires_grad=True)
        function = function_of(f"({expression}) + t * 0.0", {"t": captured})
        given = {"score": torch.tensor([s], dtype=torch.float64), "b": index, "h": index}
        given |= {"q_idx": index, "kv_idx": index}
        traced = trace_mod(function, "score", torch.float64)
        graph = parse_graph(traced.text)
        score, tables, _ = traced_gradients(traced, graph, given, torch.ones(1).double())
        results.append([score.item(), tables[0].item() if tables else 0.0])
    return results


@pytest.mark.parametrize(("expression", "s", "t", "before", "since"), FACTS)
def test_torch_differentiates_as_the_table_says(
    expression: str, s: float, t: float, before: Expected, since: Expected
) -> None:
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (s, t)]
    function = function_of(expression, {"t": leaves[1]})
    result: Tensor = function(leaves[0], *[torch.tensor(0)] * 4)
    found = torch.autograd.grad(result, leaves, allow_unused=True, materialize_grads=True)
    wanted = since if SINCE_2_14 else before
    assert [x.item() for x in found] == pytest.approx(list(wanted))


IN_ANOTHER = """
import json, sys, torch
torch.__version__ = sys.argv[1]
from tests.spellings.test_torch_derivatives import by_graphs
print(json.dumps(by_graphs()))
"""


@pytest.mark.parametrize(
    "release", ["2.14.0a0+git1", *(["2.13.1", "2.11.0+cpu", "2.15.0"] if SOAK else [])]
)
def test_graphs_are_differentiated_as_each_release_does(release: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER, release], stdout=subprocess.PIPE, check=True
    )
    since = not release.startswith(("2.11", "2.13"))
    for fact, found in zip(FACTS, json.loads(done.stdout), strict=True):
        assert found == pytest.approx(list(fact[4 if since else 3])), fact


def test_a_mixed_clamp_is_one_by_numbers() -> None:
    """torch takes a 0-d tensor beside a number for a number."""
    bound = torch.tensor(1.0, dtype=torch.float64)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.clamp(s, 0.0, bound)

    index = torch.zeros(6, dtype=torch.int64)
    score = torch.tensor([-1.0, 0.0, 0.5, 1.0, 2.0, NAN], dtype=torch.float64)
    given = {"score": score, "b": index, "h": index, "q_idx": index, "kv_idx": index}
    traced = trace_mod(mod, "score", torch.float64)
    found, _, _ = traced_gradients(traced, parse_graph(traced.text), given, torch.ones(6).double())
    leaf = score.clone().requires_grad_()
    rows = torch.stack([torch.clamp(x, 0.0, bound) for x in leaf])
    (wanted,) = torch.autograd.grad(rows.sum(), leaf)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_rules_are_named_for_the_cache() -> None:
    assert ("clamp stops at numbers" in torch_derivatives.IN_FORCE) is SINCE_2_14
