"""Values at which a table's formula could differ from torch's: infinities, 16 bits, unusual
numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import anyflex

__all__: list[str] = []

HALVES = [torch.float16, torch.bfloat16]
Function = Callable[..., Any]


def scores_of(function: Function, *tables: Tensor) -> Tensor:
    """Score of a mod for each row of the tables: the log-sum-exp of the one key."""
    length = tables[0].shape[0]
    query, key = torch.zeros(1, 1, length, 16), torch.zeros(1, 1, 1, 16)

    def mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return function(*(table[q] for table in tables))

    _, lse = anyflex.flex_attention(query, key, key, mod, return_lse=True, backend="reference")
    assert isinstance(lse, Tensor)
    return lse[0, 0]


def agree(function: Function, *tables: Tensor) -> None:
    rows = zip(*(table.unbind() for table in tables), strict=True)
    wanted = torch.stack([function(*row) for row in rows]).float()
    torch.testing.assert_close(
        scores_of(function, *tables), wanted, rtol=1e-6, atol=1e-6, equal_nan=True
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("decimals", [-2, -1, 1, 2, 3])
def test_round_to_decimals_in_16_bits(dtype: torch.dtype, decimals: int) -> None:
    table = torch.linspace(-900, 900, 301).to(dtype) * (1 if decimals < 0 else 0.01)
    agree(lambda x: torch.round(x, decimals=decimals), table)


@pytest.mark.parametrize("weight", [-0.75, -0.25, 0.25, 0.5, 0.75, 1.0])
def test_lerp_from_and_to_infinity(weight: float) -> None:
    ends = torch.tensor(list(itertools.product([1.0, math.inf, -math.inf], repeat=2)))
    # Clamped, because infinite scores would show no more than this.
    agree(lambda x, y: torch.lerp(x, y, weight).clamp(-5, 5), *ends.T.contiguous())


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [torch.uint8, torch.int32, torch.int64])
def test_ldexp_by_an_integer_has_the_type_of_what_it_multiplies(
    dtype: torch.dtype, exponent: torch.dtype
) -> None:
    exponents = torch.arange(16).to(exponent)
    values = torch.tensor([1.5, -3.0, 1000.0, 60000.0]).repeat(4).to(dtype)
    limit = 1e4  # float16 holds it
    found = scores_of(lambda x, y: torch.ldexp(x, y).clamp(-limit, limit), values, exponents)
    wanted = (values.double() * 2.0 ** exponents.double()).to(dtype).clamp(-limit, limit)
    torch.testing.assert_close(found, wanted.float(), rtol=0, atol=0)


@pytest.mark.parametrize("alpha", [-3.0, -1.0, 0.5, 2.0])
def test_celu_of_either_sign(alpha: float) -> None:
    table = torch.tensor([-6.0, -2.0, -0.5, 0.0, 0.5, 3.0])
    agree(lambda x: F.celu(x, alpha), table)
    learned, by_torch = (table.clone().requires_grad_() for _ in range(2))
    scores_of(lambda x: F.celu(x, alpha), learned).sum().backward()
    F.celu(by_torch, alpha).sum().backward()
    torch.testing.assert_close(learned.grad, by_torch.grad)


def test_a_clamp_whose_bounds_meet_passes_gradients_as_torch_does() -> None:
    points = torch.tensor(list(itertools.product([-1.0, 0.0, 1.0], repeat=3))).T.contiguous()
    ours, by_torch = ([row.clone().requires_grad_() for row in points] for _ in range(2))
    scores_of(torch.clamp, *ours).sum().backward()
    torch.clamp(*by_torch).sum().backward()
    for found, wanted in zip(ours, by_torch, strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("points", [(0.0, 0.0), (-0.0, 0.0), (0.0, -0.0)])
def test_a_hypotenuse_of_nothing_has_gradient_0_where_torch_s_is_nan(
    points: tuple[float, float],
) -> None:
    ours, by_torch = ([torch.tensor([x], requires_grad=True) for x in points] for _ in range(2))
    scores_of(torch.hypot, *ours).sum().backward()
    torch.hypot(*by_torch).sum().backward()
    assert [x.grad.item() for x in ours if x.grad is not None] == [0.0, 0.0]
    assert all(x.grad is not None and x.grad.isnan() for x in by_torch)


@pytest.mark.parametrize("function", [lambda x, y: x // y, torch.heaviside], ids=["//", "step"])
def test_what_torch_does_not_differentiate_has_gradient_0(function: Function) -> None:
    ours, by_torch = ([torch.tensor([x], requires_grad=True) for x in (1.5, 0.7)] for _ in (0, 1))
    with pytest.raises(RuntimeError, match="derivative for aten::.* is not implemented"):
        function(*by_torch).sum().backward()
    scores_of(lambda x, y: function(x, y) + 0.0 * x * y, *ours).sum().backward()
    assert [x.grad.item() for x in ours if x.grad is not None] == [0.0, 0.0]
