"""Compiled calls with block masks that change between calls, or whose captured values do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import anyflex

__all__: list[str] = []

LENGTH = 96


def documents(size: int) -> Tensor:
    return torch.arange(LENGTH) // size


def mask_of(ids: Tensor) -> Any:
    return anyflex.create_block_mask(
        lambda b, h, i, j: ids[i] == ids[j], None, None, LENGTH, LENGTH, BLOCK_SIZE=16
    )


def compiled(bias: Tensor | None = None) -> Any:
    torch._dynamo.reset()
    mod = None if bias is None else lambda s, b, h, i, j: s + bias[j]
    return torch.compile(
        lambda q, mask: anyflex.flex_attention(q, q, q, mod, mask),
        backend="aot_eager",
        fullgraph=True,
    )


def dense(q: Tensor, ids: Tensor, bias: Tensor | None = None) -> Tensor:
    scores = q @ q.mT / q.shape[3] ** 0.5 + (0.0 if bias is None else bias)
    return scores.masked_fill(ids[:, None] != ids, -torch.inf).softmax(-1) @ q


def test_values_of_a_structure_that_the_user_gave_may_change() -> None:
    q, ids = torch.randn(1, 1, LENGTH, 16), documents(40)
    whole = anyflex.create_block_mask(
        anyflex.noop_mask, None, None, LENGTH, LENGTH, BLOCK_SIZE=16, separate_full_blocks=False
    )
    mask = anyflex.BlockMask.from_runs(
        whole.offsets,
        whole.runs,
        seq_lengths=(LENGTH, LENGTH),
        block_size=16,
        mask_mod=lambda b, h, i, j: ids[i] == ids[j],
    )
    attend = compiled()
    attend(q, mask)
    ids.copy_(documents(12))
    torch.testing.assert_close(attend(q, mask), dense(q, ids))


def test_masks_that_take_turns_share_their_graph() -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    attend = torch.compile(
        lambda q, mask: anyflex.flex_attention(q, q, q, block_mask=mask),
        backend=count,
        fullgraph=True,
    )
    q = torch.randn(1, 1, LENGTH, 16)
    for size in (40, 40, 30, 12, 40, 9):
        ids = documents(size)
        torch.testing.assert_close(attend(q, mask_of(ids)), dense(q, ids))
    assert len(graphs) <= 2
