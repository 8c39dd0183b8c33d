"""Errors are caught by the types that torch raises for the same mistake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import anyflex

QUERY = torch.randn(1, 2, 16, 8)
MISTAKES: dict[str, tuple[tuple[Tensor, Tensor, Tensor], str]] = {
    "three dimensions": ((QUERY[0], QUERY[0], QUERY[0]), "four dimensions"),
    "another dtype of value": ((QUERY, QUERY, QUERY.double()), "one dtype"),
}


@pytest.fixture(params=["eager", "compiled"])
def attend(request: pytest.FixtureRequest) -> Iterator[Any]:
    torch._dynamo.reset()
    if request.param == "eager":
        yield anyflex.flex_attention
    else:
        yield torch.compile(anyflex.flex_attention, backend="eager", fullgraph=True)


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize(
    "caught", [anyflex.ArgumentError, anyflex.ArgumentTypeError, ValueError, NotImplementedError]
)
def test_a_wrong_form_is_caught_as_torchs_error(name: str, caught: Any, attend: Any) -> None:
    given, message = MISTAKES[name]
    with pytest.raises(caught, match=message) as raised:
        attend(*given)
    assert isinstance(raised.value, anyflex.TensorFormError)


def test_torch_raises_not_implemented_for_three_dimensions() -> None:
    with pytest.raises(NotImplementedError):
        torch_flex.flex_attention(*MISTAKES["three dimensions"][0])
