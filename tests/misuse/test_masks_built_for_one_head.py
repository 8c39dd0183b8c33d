"""A mask built for batch entry or head 0 alone, from a mask mod that reads the index, serves no
others: it would be silently wrong for them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex


def reads_b(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k + 40 * b


def reads_h(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k + 40 * h


def tensors(batch: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(batch, heads, 256, 16) for _ in range(3))
    return query, key, value


SAME_BLOCKS: list[Callable[[Any], Any]] = [
    lambda mask: mask,
    lambda mask: mask[0],
    lambda mask: mask.row_slice(0, 256),
    lambda mask: mask.extend(256),
    copy.deepcopy,
    lambda mask: pickle.loads(pickle.dumps(mask)),
]


@pytest.mark.parametrize(
    "derived", SAME_BLOCKS, ids=["itself", "slice", "rows", "longer", "copy", "saved"]
)
def test_more_batch_entries_are_refused(derived: Callable[[Any], Any]) -> None:
    mask = derived(anyflex.create_block_mask(reads_b, None, 2, 256, 256))
    with pytest.raises(
        anyflex.BlockMaskError, match=r"mask mod reads b;.*the call has B = 3.*B=3\)"
    ):
        anyflex.flex_attention(*tensors(3, 2), block_mask=mask)
    anyflex.flex_attention(*tensors(1, 2), block_mask=mask)


def test_more_heads_are_refused() -> None:
    mask = anyflex.create_block_mask(reads_h, 2, 1, 256, 256)
    with pytest.raises(
        anyflex.BlockMaskError, match=r"mask mod reads h;.*the call has H = 4.*H=4\)"
    ):
        anyflex.flex_attention(*tensors(2, 4), block_mask=mask)


def test_a_slice_of_one_entry_is_not_for_all() -> None:
    whole = anyflex.create_block_mask(reads_b, 2, None, 256, 256)
    with pytest.raises(anyflex.BlockMaskError, match="mask mod reads b"):
        anyflex.flex_attention(*tensors(2, 1), block_mask=whole[1])
    query, key, value = tensors(2, 1)
    both = anyflex.flex_attention(query, key, value, block_mask=whole)
    second = anyflex.flex_attention(query[1:], key[1:], value[1:], block_mask=whole[1])
    torch.testing.assert_close(second, both[1:])


def test_compiled_calls_refuse_too() -> None:
    mask = anyflex.create_block_mask(reads_b, None, None, 256, 256)
    call = torch.compile(
        lambda q, k, v: anyflex.flex_attention(q, k, v, block_mask=mask),
        backend="eager",
        fullgraph=True,
    )
    with pytest.raises(anyflex.BlockMaskError, match="mask mod reads b"):
        call(*tensors(2, 1))


def test_a_slice_whose_mask_mod_is_not_traced_is_not_asked() -> None:
    # It may read b, or not, as this one.
    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.special.i0((q - k) / 64.0) < 1.2

    one = anyflex.create_block_mask(near, 2, 2, 64, 64)[0:1]
    query, key, value = (torch.randn(2, 2, 64, 16) for _ in range(3))
    anyflex.flex_attention(query, key, value, block_mask=one)


@pytest.mark.parametrize("step", [0, 2])
def test_a_number_that_makes_all_heads_alike_is_no_reason(step: int) -> None:
    # The mod's text reads h, and with 0 nothing depends on it: the mask has H' = 1.
    def kept(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < 100 + h * step)

    mask = anyflex.create_block_mask(kept, 2, 2, 256, 256)
    query, key, value = tensors(2, 2)
    out = anyflex.flex_attention(query, key, value, block_mask=mask)
    live = anyflex.create_mask(kept, 2, 2, 256, 256)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, live)
    torch.testing.assert_close(out, expected)


def test_structure_that_is_the_users_own_is_not_asked() -> None:
    # Its blocks weren't decided by the mask mod: one list of PARTIAL blocks may be right for all.
    edges = torch.tensor([[[0, 1, 2]]], dtype=torch.int32)
    runs = torch.tensor([[0, 2, 2], [0, 2, 2]], dtype=torch.int32)
    mask = anyflex.BlockMask.from_runs(edges, runs, seq_lengths=(256, 256), mask_mod=reads_b)
    query, key, value = tensors(2, 1)
    out = anyflex.flex_attention(query, key, value, block_mask=mask)
    own = anyflex.create_block_mask(reads_b, 2, None, 256, 256)
    torch.testing.assert_close(out, anyflex.flex_attention(query, key, value, block_mask=own))
    assigned = anyflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256)
    assigned.mask_mod = reads_b
    anyflex.flex_attention(query, key, value, block_mask=assigned)
