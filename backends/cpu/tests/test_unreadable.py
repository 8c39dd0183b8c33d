"""Tensors without the memory that their sizes need never reach the native library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import anyflex

SHAPE = (1, 2, 16, 8)


def resized(size: int) -> Tensor:
    tensor = torch.randn(SHAPE)
    tensor.untyped_storage().resize_(size)
    return tensor


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch._efficientzerotensor(SHAPE),
        lambda: torch._to_functional_tensor(torch.randn(SHAPE)),
        lambda: resized(0),
        lambda: resized(1020),
    ],
    ids=["zero tensor", "functional", "freed", "too short"],
)
@pytest.mark.parametrize("name", ["query", "key", "value", "dout"])
def test_an_input_without_its_memory_is_no_fault_of_the_plugin(
    made: Callable[[], Tensor], name: str
) -> None:
    tensors = {each: torch.randn(SHAPE, requires_grad=True) for each in ("query", "key", "value")}
    if name != "dout":
        tensors[name] = made()
    with pytest.raises(anyflex.ArgumentError, match=f"^{name}"):
        out = anyflex.flex_attention(**tensors, backend="cpu")
        torch.autograd.grad(out, tensors["query"], made())
