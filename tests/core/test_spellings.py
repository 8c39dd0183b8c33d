"""Other forms of the spellings in tests/spellings: keywords, NumPy numbers, sums of several."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anyflex.errors import ModTraceError
from anyflex.mod_graph.differentiate import differentiate
from anyflex.mod_graph.evaluate import evaluate
from anyflex.mod_graph.graph import parse_graph
from anyflex.mod_graph.simplify import simplify
from anyflex.tracing.trace import trace_mod

__all__: list[str] = []

NAMES: dict[str, Any] = {
    "numpy": numpy,
    "torch": torch,
    "F": F,
    "math": math,
    "operator": operator,
}

# Expressions of the score s and the indices q, k; w is a captured table, t0 a captured scalar, m a
# condition.
EXPRESSIONS = """
torch.add(input=s, other=k, alpha=2)
s.mul(other=2.5)
torch.mul(input=t0, other=s)
torch.pow(s, exponent=2)
torch.clamp(input=s, min=0.25)
torch.where(condition=m, input=s, other=2 * s)
torch.where(m, input=s, other=2 * s)
s.where(condition=m, other=2 * s)
torch.masked_fill(input=s, mask=m, value=2.0)
torch.lerp(s, end=2 * s, weight=0.25)
torch.tanh(input=s, out=None)
F.softplus(input=s, beta=2.0)
s + torch.full_like(s, fill_value=2.0)
s * torch.tensor(data=2.0)
s * torch.full(size=(), fill_value=2.0)
s * numpy.float64(2.5)
numpy.float64(2.5) * s
s + k // numpy.int32(3)
s ** 3
(k ** 2) * s
torch.sub(s, 1.0, alpha=3)
torch.true_divide(q, 3) + s
torch.square(s)
s + q // 3
s + q % 3
s + 7 // (k + 1)
s + 7 % (k + 1)
s.detach() // 0.5 + s
s + torch.div(q - k, 3, rounding_mode='trunc')
s + torch.div(q - k, 3, rounding_mode='floor')
torch.div(s, 0.3, rounding_mode='trunc') + s
s + torch.fmod(q - k, 3)
s + (q & 3) + (q | 1) + (q ^ k)
s + ~q
s + (1 << (k % 8)) + (q << 2) + ((q - k) >> 1)
s + torch.bitwise_left_shift(q, 1)
s + (m & q)
s + (q ^ True)
s * (q >= k)
torch.where(q < 2.5, s, 2 * s)
torch.where(5 > q, s, 2 * s)
torch.where(torch.logical_xor(m, k > 1), s, -s)
torch.where(torch.logical_or(q, k), s, -s)
torch.where(~m, s, -s)
torch.where(torch.isclose(s, s + 1e-9), s, -s)
torch.where(torch.signbit(s), s, 3 * s)
torch.where(torch.isfinite(s) & ~torch.isnan(s), s, 0.0)
torch.where(m, 1.0, 0.0) * s
torch.where(m, q, 1.5) * s
s.masked_fill(m, 0.25)
torch.clamp(s, min=0.1)
torch.clamp(s, min=s - 1, max=s * 0.5)
s.clip(0.1, 1)
torch.clamp(s, 2.0, 1.0) + s
torch.clamp_min(s, 0.1) + s.clamp_max(1)
torch.clamp(q, -2.5, 2.5) * s
torch.maximum(s, s * 2) + torch.minimum(q, k)
torch.fmax(s, s * 2) + torch.fmin(s, s * 3)
torch.heaviside(s.detach(), s.detach() * 0) * s
torch.floor(s) + s
s.ceil() + torch.round(s) + torch.trunc(s) + s
torch.round(s, decimals=2) + s
torch.sign(s) * s
s * (q - k).abs()
torch.log(s.abs() + 0.1)
torch.log2(1.0 + k) * s
torch.log10(s.abs() + 0.1)
torch.log1p(s.abs())
torch.sqrt(k) * s
torch.sqrt(s.abs() + 0.1)
torch.rsqrt(s.abs() + 0.1)
torch.reciprocal(s + 10)
torch.logaddexp2(s, s * 2)
torch.xlogy(s.abs() + 0.1, s.abs() + 0.2)
torch.sin(s) + torch.cos(s) + torch.tan(s * 0.3)
(q - k).sin() * s
torch.asin(torch.tanh(s) * 0.9) + torch.arccos(torch.tanh(s) * 0.9)
torch.atan(s) + torch.atan2(s, s + 5)
torch.sinh(s) + torch.cosh(s) + torch.tanh(s)
torch.asinh(s) + torch.acosh(s.abs() + 2) + torch.atanh(torch.tanh(s) * 0.9)
torch.deg2rad(s) + torch.rad2deg(s)
torch.erf(s) + torch.erfc(s) + torch.special.erf(s)
torch.special.logit(torch.sigmoid(s), 1e-6)
torch.special.entr(s.abs() + 0.1)
F.relu6(s * 4)
F.celu(s, 1.3)
F.softplus(s * 10, beta=2.0)
F.hardsigmoid(s * 3)
F.hardswish(s * 3)
F.softshrink(s, 0.3)
s.to(torch.float32).to(torch.float64)
k.to(s.dtype) * s
k.to(s) * s + k.type_as(s)
s + s.int() + s.long()
s + k.bool() + k.short()
s.clone() + s.detach()
s + torch.zeros_like(s) + torch.ones_like(q)
s + torch.full_like(s, 2.0) + torch.full_like(k, 2.7)
s + s.new_zeros(()) + s.new_full((), 3.0)
s + torch.tensor(3.0) + torch.full((), 0.5) + torch.zeros(())
s + math.log(2.0) + torch.pi
torch.iinfo(torch.int32).max - q + s
s + w[q]
s + w[q - 3]
s + w2[q, k] + w2[q][k] + w2[..., k][q] + w2[:, k][q] + w2[0, k] + w2[0][k]
s + w[i16[k].long()]
s + w[m.int()]
s + torch.select(w2, 0, 1)[k]
s + w2.t()[k, q] + w.view(4, 4)[q // 4 % 4, q % 4]
t0 * s + t0.exp()
w.detach()[q] * s
(s if s.ndim == 0 else None) + (1 if s.is_floating_point() else 0)
"""


def operands() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "w": torch.randn(16, generator=generator),
        "w2": torch.randn(16, 16, generator=generator),
        "i16": torch.randint(0, 16, (16,), generator=generator).to(torch.int16),
        "t0": torch.tensor(0.7),
    }


def pairs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    score = torch.randn(64, generator=generator) * 1.5
    return {
        "score": score,
        "q_idx": torch.randint(0, 16, (64,), generator=generator),
        "kv_idx": torch.randint(0, 16, (64,), generator=generator),
    }


@pytest.fixture(autouse=True)
def wide_floats() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def function_of(expression: str, tables: dict[str, Tensor]) -> Callable[..., Any]:
    source = f"lambda s, b, h, q, k: (lambda m: {expression})(q >= k)"
    return eval(source, {**NAMES, **tables})  # type: ignore[no-any-return]


@pytest.mark.parametrize("expression", EXPRESSIONS.strip().splitlines())
def test_a_spelling_means_what_torch_means(expression: str) -> None:
    tables, inputs = operands(), pairs()
    function = function_of(expression, tables)
    zero = torch.zeros_like(inputs["q_idx"])
    score = inputs["score"].clone().requires_grad_()

    # In a pair's own scope: vmap over pairs can't follow an index into a closed-over table.
    rows = [
        function(s, b, b, q, k)
        for s, b, q, k in zip(score, zero, inputs["q_idx"], inputs["kv_idx"], strict=True)
    ]
    wanted = torch.stack([row.to(torch.float64) for row in rows])
    (wanted_gradient,) = (
        torch.autograd.grad(wanted.sum(), score, allow_unused=True)
        if wanted.requires_grad
        else (None,)
    )
    if wanted_gradient is None:
        wanted_gradient = torch.zeros_like(score)

    traced = trace_mod(function, "score", torch.float64)
    graph = parse_graph(traced.text)
    values = {**inputs, "b": zero, "h": zero}
    for variant in (graph, simplify(graph)):
        (found,) = evaluate(
            variant.nodes,
            (variant.output,),
            inputs=values,
            captured=traced.captured,
            ints=traced.ints,
            floats=traced.floats,
        )
        torch.testing.assert_close(found.expand(64), wanted.detach(), rtol=1e-12, atol=1e-12)
    derivative = differentiate(graph, wanted_captured=frozenset())
    if derivative.score is None:
        assert not wanted_gradient.any()
        return
    (gradient,) = evaluate(
        derivative.nodes,
        (derivative.score,),
        inputs={**values, "grad": torch.ones(64)},
        captured=traced.captured,
        ints=traced.ints,
        floats=traced.floats,
    )
    # torch's own formulas for these two hold constants in float32.
    rough = expression.startswith(("F.celu", "F.hardsigmoid"))
    close = 1e-7 if rough else 1e-11
    torch.testing.assert_close(gradient.expand(64), wanted_gradient, rtol=close, atol=close)


REFUSED = {
    "min(s, s * 2)": "torch.minimum",
    "{0: s}[q]": "captured tensor",
    "torch.bernoulli(s)": "random",
    "w.sum() * s": "reduction",
    "s * (w2[q] == 1)": r"row of shape \[16\]",
    "s + (w2[q] + 1)[k:]": r"row of shape|slice|symbol",
    "s if w2[q] else -s": "branch",
    "s + w2[q].float()": r"row of shape \[16\]",
    "s.maximum(1.0)": "Python number",
    "torch.mul(s, 2, out=w)": "out=",
    "torch.mul(w, 2, out=w)[q]": "out=",
    "s * 2**70": "64 bits",
    "s * 10**400": "64 bits",
    "s * numpy.ones(2)": "from_numpy",
    "torch.atan2(s, 1.0)": "torch.atan2 does not take .*torch.full_like",
    "torch.clamp(s, 'a')": "torch.clamp does not take",
    "torch.vmap(lambda x: x + s)(w)": "transform",
    "torch.func.grad(lambda x: x * 2)(s)": "transform",
    "None": "return",
    "(s, s)": "tuple",
    "m": "mask",
}


def test_a_numpy_array_of_one_number_keeps_its_fraction() -> None:
    weight = numpy.array(2.5)
    assert trace_mod(lambda s, b, h, q, k: s * weight, "score").floats == [2.5]


@pytest.mark.parametrize("expression", REFUSED)
def test_what_a_mod_may_not_do_is_refused_with_its_line(expression: str) -> None:
    tables = operands()
    before = {name: table.clone() for name, table in tables.items()}
    with pytest.raises(ModTraceError, match=REFUSED[expression]) as caught:
        trace_mod(function_of(expression, tables), "score")
    assert caught.value.operation
    assert not caught.value.pure
    assert all(torch.equal(tables[name], before[name]) for name in tables)


@pytest.mark.parametrize(
    "expression", ["torch.lgamma(s)", "torch.special.i0(s)", "s.erfinv()", "torch.gcd(q, k)"]
)
def test_an_unknown_pure_operation_is_told_apart(expression: str) -> None:
    with pytest.raises(ModTraceError) as caught:
        trace_mod(function_of(expression, operands()), "score")
    assert caught.value.pure
