"""Soft caps whose numbers are folded into a coarse tanh, compared with core's evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tile_case import Case, M, N
from torch import Tensor

from anyflex.plugin import differentiate, parse_graph, simplify
from anyflex.tracing.trace import trace_mod
from anyflex_triton.lowering import cap_factors

ScoreMod = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DIVISORS = torch.tensor([20.0, 50.0, 0.5])
EXTREMES = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-30])
OFF = 5e-7
"""Error of `tanh_capped` for a factor of 1."""


class Capped(NamedTuple):
    """A soft cap.

    Args:
        mod: the score mod.
        factors: expected `cap_factors`, as numbers.
        steepest: sum of each factor's size over its divisor's.
    """

    mod: ScoreMod
    factors: tuple[float, ...]
    steepest: float


def soft(cap: float) -> ScoreMod:
    return lambda s, b, h, q, k: cap * torch.tanh(s / cap)


def two_factors(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    bounded = torch.tanh(s / 30)
    return 30 * bounded + torch.where(q >= k, bounded * 10, 0.25)


MODS = {
    "30": Capped(soft(30.0), (30.0,), 1.0),
    "-30": Capped(soft(-30.0), (-30.0,), 1.0),
    "a half": Capped(soft(0.5), (0.5,), 1.0),
    "1": Capped(soft(1.0), (1.0,), 1.0),
    "a divisor for each head": Capped(
        lambda s, b, h, q, k: 30 * torch.tanh(s / DIVISORS[h]), (30.0,), 60.0
    ),
    "two caps": Capped(
        lambda s, b, h, q, k: 30 * torch.tanh(s / 30) - 20 * torch.tanh((s + 1) / 20),
        (30.0, 20.0),
        2.0,
    ),
    "two factors": Capped(two_factors, (30.0, 10.0), 40 / 30),
    "no divisor": Capped(lambda s, b, h, q, k: 20 * torch.tanh(s), (20.0,), 20.0),
}
TILES = [
    {"b": 0, "h": 2, "first_q": 8, "first_k": 0},
    {"b": 0, "h": 0, "first_q": 0, "first_k": 8, "rows": True},
]


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("name", MODS)
def test_a_folded_soft_cap_and_its_slope_are_core_s(
    name: str, constant: bool, coarse: bool
) -> None:
    capped = MODS[name]
    traced = trace_mod(capped.mod, "score")
    numbers = {f"i{i}": float(x) for i, x in enumerate(traced.ints)}
    numbers |= {f"f{i}": x for i, x in enumerate(traced.floats)}
    graph = simplify(parse_graph(traced.text).bind(constants=numbers if constant else None))
    slope = differentiate(graph, wanted_captured=frozenset())
    assert slope.score is not None
    off = OFF if coarse else 2e-7
    near = {"rtol": 1e-6, "equal_nan": True}
    for tile in TILES:
        case = Case(
            graph, None, traced.captured, (), traced.ints, traced.floats, dtype=torch.float16,
            **tile,  # type: ignore[arg-type]
        )  # fmt: skip
        found_factors = (numbers.get(str(f), f) for f in cap_factors(case.spec))
        assert tuple(found_factors) == capped.factors
        assert "ops.tanh(" not in case.source
        case.score[:, ::4] *= 20
        case.score.view(-1)[: 3 * len(EXTREMES) : 3] = EXTREMES
        wanted = case.value(graph)
        size = off * sum(map(abs, capped.factors))
        early = ["score_mod_of_read"] if traced.captured else []
        for mod in ["score_mod", *early]:
            found = case.run(mod, "score", coarse=coarse)
            torch.testing.assert_close(found, wanted, atol=size, **near)
        (wanted,) = case.evaluated(slope.nodes, [slope.score])
        found = case.run("score_mod_backward", "backward", coarse=coarse)
        # The error of 1 - tanh^2 is twice as large.
        size = 2 * off * capped.steepest * case.grad.abs().max().item()
        torch.testing.assert_close(found, wanted.expand(M, N), atol=size, **near)


@pytest.mark.parametrize("name", MODS)
def test_a_factor_is_the_tanh_s_own(name: str) -> None:
    traced = trace_mod(MODS[name].mod, "score")
    graph = simplify(parse_graph(traced.text))
    case = Case(graph, None, traced.captured, dtype=torch.float16)
    forward = case.source.split("def score_mod(")[1].split("@triton.jit")[0]
    own = forward.count("ops.tanh_capped(") - forward.count(", 1.0, COARSE)")
    assert own == len(MODS[name].factors)
