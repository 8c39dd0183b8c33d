"""Tensors without the memory that their sizes need never reach the native library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.utils._pytree as torch_pytree
from dense import assert_near, dense_attention
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


def test_a_rebuilt_mask_s_tensors_are_read_in_the_form_that_they_have() -> None:
    ranks = (torch.arange(300) * 7 % 300) / 300
    rising = lambda b, h, q, k: (ranks[q] < ranks[k]) | (q == k)  # noqa: E731
    mask = anyflex.create_block_mask(rising, None, None, 300, 300, BLOCK_SIZE=64)
    query = torch.randn(1, 2, 300, 16)

    def attention(change: Callable[[Tensor], Tensor]) -> Tensor:
        mapped = torch_pytree.tree_map_only(Tensor, change, mask)
        out = anyflex.flex_attention(query, query, query, block_mask=mapped, backend="cpu")
        assert isinstance(out, Tensor)
        return out

    wanted, _ = dense_attention(query, query, query, mask_mod=rising)
    assert_near(attention(lambda t: torch.stack([t, t + 5], -1)[..., 0]), wanted, torch.float32)
    for change in (
        lambda t: t if t.is_floating_point() else t.long(),
        lambda t: t.double() if t.is_floating_point() else t,
    ):
        with pytest.raises(anyflex.BlockMaskError, match="must have dtype"):
            attention(change)
