"""Wrong shapes are reported in compiled models with symbolic sizes as in an eager call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anyflex
from anyflex.errors import ArgumentError, BlockMaskError


def causal(length: int) -> anyflex.BlockMask:
    return anyflex.create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length)


def told(error: type[Exception], query: torch.Tensor, mask: Any, *, warm: bool) -> str:
    compiled = torch.compile(
        lambda query, mask: anyflex.flex_attention(query, query, query, block_mask=mask),
        fullgraph=True,
        backend="eager",
        dynamic=True,
    )
    if warm:
        compiled(torch.randn(2, 2, 20, 16), causal(20))
    with pytest.raises(error) as raised:
        compiled(query, mask)
    return str(raised.value)


@pytest.mark.parametrize("warm", [False, True])
def test_a_mask_of_other_lengths(warm: bool) -> None:
    text = told(BlockMaskError, torch.randn(2, 2, 32, 16), causal(31), warm=warm)
    assert "(Q_LEN, KV_LEN) = (31, 31), the call has (32, 32)" in text


def test_a_tensor_of_three_dimensions() -> None:
    text = told(ArgumentError, torch.randn(4, 6, 32), None, warm=False)
    assert "got shape [4, 6, 32]" in text
