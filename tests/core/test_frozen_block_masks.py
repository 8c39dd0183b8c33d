"""A block mask owns its structure; what may change is its mask mod and what that captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.block_mask.block_mask import BlockMask
from anyflex.errors import BlockMaskError

__all__: list[str] = []

LENGTH = 48


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def dense(query: Tensor, key: Tensor, value: Tensor, live: Tensor) -> Tensor:
    scores = query.double() @ key.double().mT * query.shape[-1] ** -0.5
    return scores.masked_fill(~live, -torch.inf).softmax(-1) @ value.double()


def check(mask: BlockMask, live: Tensor, backend: str | None) -> None:
    query, key, value = torch.randn(3, 1, 2, LENGTH, 8).unbind(0)
    out = anyflex.flex_attention(query, key, value, block_mask=mask, backend=backend)
    torch.testing.assert_close(out.double(), dense(query, key, value, live), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["offsets", "runs", "BLOCK_SIZE"])
def test_structure_can_not_be_assigned(name: str) -> None:
    mask = anyflex.create_block_mask(causal, None, None, LENGTH, LENGTH)
    with pytest.raises(BlockMaskError, match=f"{name} of a block mask can't be assigned"):
        setattr(mask, name, getattr(mask, name))


@pytest.mark.parametrize("capacity", [None, 9])
def test_writing_to_the_given_tensors_changes_no_mask(capacity: int | None) -> None:
    offsets = torch.tensor([[[0, 1, 3, 5]]], dtype=torch.int32)
    runs = torch.tensor([[0, 1, 2], [0, 1, 1], [1, 2, 2], [0, 2, 1], [2, 3, 2]]).int()
    mask = BlockMask.from_runs(
        offsets,
        runs,
        seq_lengths=(LENGTH, LENGTH),
        block_size=16,
        mask_mod=causal,
        capacity=capacity,
    )
    offsets.zero_()
    runs.zero_()
    assert mask == anyflex.create_block_mask(causal, None, None, LENGTH, LENGTH, BLOCK_SIZE=16)
    check(mask, torch.ones(LENGTH, LENGTH).tril().bool(), None)


@pytest.mark.parametrize("backend", ["reference", None])
def test_the_forward_of_a_mask_with_room_follows_what_is_written_into_it(
    backend: str | None,
) -> None:
    """As a CUDA graph writes between its replays."""
    mask = BlockMask.from_runs(
        torch.tensor([[[0, 1, 2, 3]]], dtype=torch.int32),
        torch.tensor([[0, 1, 1]] * 3, dtype=torch.int32),
        seq_lengths=(LENGTH, LENGTH),
        block_size=16,
        capacity=9,
    )
    live = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    live[:, :16] = True
    check(mask, live, backend)
    mask.offsets.copy_(torch.tensor([[[0, 1, 2, 4]]]))
    mask.runs[:4] = torch.tensor([[0, 2, 1], [1, 2, 1], [0, 1, 1], [2, 3, 1]])
    live = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    live[:16, :32] = live[16:32, 16:32] = live[32:, :16] = live[32:, 32:] = True
    check(mask, live, backend)


def test_a_copy_on_another_device_is_kept_until_a_captured_tensor_changes() -> None:
    ids = torch.arange(LENGTH) // 20
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: ids[q] == ids[k], None, None, LENGTH, LENGTH
    )
    elsewhere = torch.device("meta")
    copy = mask.on(elsewhere)
    assert copy.traced is not None and copy.traced.captured[0].device == elsewhere
    assert mask.on(elsewhere) is copy
    ids.add_(1)
    assert mask.on(elsewhere) is not copy
    assert mask.on(elsewhere) is mask.on(elsewhere)


def test_a_copy_with_tensors_of_inference_mode_is_not_kept() -> None:
    """They count no changes, so that nothing would tell that the copy is stale."""
    with torch.inference_mode():
        ids = torch.arange(LENGTH) // 20
        mask = anyflex.create_block_mask(
            lambda b, h, q, k: ids[q] == ids[k], None, None, LENGTH, LENGTH
        )
        elsewhere = torch.device("meta")
        assert mask.on(elsewhere) is not mask.on(elsewhere)
        assert mask.on(elsewhere).views() is mask.on(elsewhere).views()


def test_the_mask_mod_of_a_mask_may_be_assigned() -> None:
    mask = anyflex.create_block_mask(causal, None, None, LENGTH, LENGTH, BLOCK_SIZE=16)
    mask.mask_mod = lambda b, h, q, k: q > k
    live = torch.ones(LENGTH, LENGTH).tril(-1).bool()
    live[0, 0] = True  # keeps the first row alive in the formula below
    query, key, value = torch.randn(3, 1, 2, LENGTH, 8).unbind(0)
    out = anyflex.flex_attention(query, key, value, block_mask=mask)
    wanted = dense(query, key, value, live)
    torch.testing.assert_close(out[:, :, 1:].double(), wanted[:, :, 1:], rtol=1e-5, atol=1e-5)
    assert not out[:, :, 0].any()
