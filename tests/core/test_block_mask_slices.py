"""Slices of a block mask by batch entry, head and row of q blocks."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anyflex.block_mask.block_mask import BlockMask
from anyflex.block_mask.create import create_block_mask, create_mask
from anyflex.block_mask.mask_function import sliced_mask_mod
from anyflex.errors import BlockMaskError
from anyflex.frontend.attention import flex_attention
from tests.core.dense_blocks import dense_mask, written_kinds
from tests.core.given_masks import (
    by_batch_and_head,
    causal,
    lists_mask,
    runs_mask,
    untraceable,
)


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        (1, 2),
        (slice(None), 1),
        (slice(0, 2), slice(1, 3), slice(1, None)),
        (slice(None), slice(None), 4),
        (slice(None), slice(None), slice(0, 5, 2)),
        (slice(None), slice(None), slice(None, None, -1)),
        (slice(None), slice(None), torch.tensor([3, 0, -1])),
        (torch.tensor([True, False]),),
        (slice(None), [2, 0]),
        (slice(0, 0),),
    ],
)
def test_a_slice_has_the_blocks_of_the_chosen_rows(index: Any) -> None:
    mask = create_block_mask(by_batch_and_head, 2, 3, 70, 90, BLOCK_SIZE=16)
    grid = mask.views().kind_rows(0, 5)
    wanted = grid
    indices = index if isinstance(index, tuple) else (index,)
    for axis, chosen in enumerate(indices):
        positions = torch.arange(grid.shape[axis]).numpy()[
            chosen.numpy() if isinstance(chosen, Tensor) else chosen
        ]
        wanted = wanted.index_select(axis, torch.as_tensor(positions.copy()).reshape(-1))
    sliced = mask[index]
    columns = mask.views().kv_blocks
    assert torch.equal(written_kinds(sliced.offsets, sliced.runs, columns), wanted)
    assert sliced.seq_lengths[1] == 90
    assert sliced.views().q_blocks == wanted.shape[2]


def test_a_slice_has_the_length_of_its_rows() -> None:
    mask = create_block_mask(by_batch_and_head, 2, 3, 70, 90, BLOCK_SIZE=16)
    assert mask[0].shape == (1, 3, 70, 90)
    assert mask[:, :, :2].shape == (2, 3, 32, 90)
    assert mask[:, :, 4].shape == (2, 3, 6, 90)
    assert mask[:, :, 3:].shape == (2, 3, 22, 90)
    assert mask[:, :, torch.tensor([4])].shape == (2, 3, 16, 90)
    assert mask[:, :, ::-1].shape == (2, 3, 80, 90)


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize(
    "index",
    [
        1,
        (slice(None), slice(1, None)),
        (slice(None), slice(None), slice(1, 4)),
        (-1, 2, slice(2, None)),
        (1, [2, 0], slice(3, None)),
        (slice(None, None, -1), slice(None, None, 2), slice(3, None)),
        (1, slice(1, 3), torch.tensor([3, 0, 1])),
    ],
)
def test_the_mask_mod_of_a_slice_sees_the_indices_of_the_whole_mask(
    index: Any, traced: bool
) -> None:
    mod = by_batch_and_head
    if not traced:
        mod = untraceable
    mask = create_block_mask(mod, 2, 3, 70, 90, BLOCK_SIZE=16)
    assert (mask.opaque is None) == traced
    live = dense_mask(mod, 2, 3, 80, 90).view(2, 3, 5, 16, 90)
    for axis, chosen in enumerate(index if isinstance(index, tuple) else (index,)):
        positions = torch.arange(live.shape[axis]).numpy()[
            chosen.numpy() if isinstance(chosen, Tensor) else chosen
        ]
        live = live.index_select(axis, torch.as_tensor(positions.copy()).reshape(-1))
    sliced = mask[index]
    rows = sliced.seq_lengths[0]
    live = live.flatten(2, 3)[:, :, :rows]
    assert not sliced.needs_mask_mod and (sliced.opaque is None) == traced
    assert torch.equal(dense_mask(sliced.mask_mod, *live.shape), live)
    again = sliced[:, :, 1:]
    assert torch.equal(dense_mask(again.mask_mod, *live.shape[:2], rows - 16, 90), live[:, :, 16:])
    sliced.mask_mod = causal
    assert sliced.mask_mod is causal


def test_a_call_of_a_slices_mask_mod_makes_no_tensor_of_numbers() -> None:
    class Recorded(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.append(function)
            return function(*args, **(kwargs or {}))

    called: list[Any] = []
    mask = create_block_mask(untraceable, 2, 3, 70, 90, BLOCK_SIZE=16)
    sliced = pickle.loads(pickle.dumps(mask[:, [2, 0], 1:]))
    zero = torch.tensor(0)
    with Recorded():
        sliced.mask_mod(zero, zero, zero, zero)
    assert Tensor.__getitem__ in called and torch.tensor not in called


def test_a_slice_keeps_the_function_itself_where_no_index_shifts() -> None:
    mask = create_block_mask(by_batch_and_head, 2, 3, 70, 90, BLOCK_SIZE=16)
    assert mask[0].mask_mod is by_batch_and_head
    assert mask[:, :2, :3].mask_mod is by_batch_and_head
    per_head = create_block_mask(lambda b, h, q, k: k <= 9 * h, 1, 3, 70, 90, BLOCK_SIZE=16)
    assert per_head[:, :, 2:].mask_mod is per_head.mask_mod
    full = runs_mask([0, 1, 2], [(0, 1, 1), (0, 2, 1)], mask_mod=None)
    assert full[:, :, 1].mask_mod is None


def test_slices_at_different_places_share_one_graph() -> None:
    mask = create_block_mask(by_batch_and_head, 2, 3, 70, 90, BLOCK_SIZE=16)
    slices = [mask[1, 1, 1:], mask[1, 2, 3:], mask[1:, 1:, 1:][:, 1, 2:], mask[1, 2, 1:][0]]
    assert len({sliced.traced.text for sliced in slices}) == 1
    assert slices[0].traced.text != mask.traced.text


def torch_slice() -> BlockMask:
    """A mask whose mask mod is still to be assigned."""
    return lists_mask([1, 2], [[0, 0], [0, 1]], mask_mod=sliced_mask_mod)


def test_a_slice_of_torch_needs_a_mask_mod_and_stays_so() -> None:
    for mask in (torch_slice(), torch_slice()[:, :, 1:], torch_slice().row_slice(16, 32)):
        assert mask.needs_mask_mod and mask.traced is None and mask.mask_mod is not None
        with pytest.raises(BlockMaskError, match="assign `mask.mask_mod"):
            mask.mask_mod(*torch.zeros(4, 1, dtype=torch.int64))
        assert pickle.loads(pickle.dumps(mask)).needs_mask_mod
        mask.mask_mod = causal
        assert not mask.needs_mask_mod and mask.traced is not None


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (7, "batch index 7 is out of range for size 2"),
        (-3, "batch index -3"),
        ((0, 7), "head index 7 is out of range for size 3"),
        ((0, 0, 5), "q block index 5 .*size 5"),
        ((slice(2, 4),), "batch index 2 .*size 2"),
        ((0, torch.tensor([0, 3])), "head index 3"),
        ((torch.tensor([True]),), "batch index has 1 bools, and the size is 2"),
        (
            (0, torch.tensor([0.5])),
            r"head index must be .*, got tensor\(\[0.5",
        ),
        ((0, 0, 0, slice(None), 0), "up to 4 indices.*got 5"),
        ((torch.tensor([0]), torch.tensor([0])), "at most one tensor index"),
        ("b", "batch index must be an int, a slice, or a vector of ints or bools, got 'b'"),
        ((0, 0, ["a"]), r"q block index must be .* ints or bools, got \['a'\]"),
        (True, "batch index must be"),
        (None, "batch index must be"),
    ],
)
def test_a_wrong_slice_is_named(index: Any, message: str) -> None:
    mask = create_block_mask(by_batch_and_head, 2, 3, 70, 90, BLOCK_SIZE=16)
    with pytest.raises(BlockMaskError, match=message):
        mask[index]


def test_a_mask_that_is_the_same_for_every_head_says_so_when_it_is_sliced() -> None:
    with pytest.raises(BlockMaskError, match="the mask is the same for every head"):
        create_block_mask(causal, 4, None, 8, 8)[0, 2]


@pytest.mark.parametrize(
    ("index", "sizes", "stored"),
    [
        ((3, 1), (1, 1), (1, 1)),
        ((slice(1, 3), slice(None)), (2, 5), (1, 5)),
        ((slice(None, None, -1), [4, 0, 2]), (4, 3), (1, 3)),
        ((torch.tensor([3, 3]), -1, slice(2, None)), (2, 1), (1, 1)),
    ],
)
def test_entries_that_are_stored_once_are_sliced_as_they_were_asked_for(
    index: Any, sizes: tuple[int, int], stored: tuple[int, int]
) -> None:
    mod = lambda b, h, q, k: q + 16 * h >= k  # noqa: E731
    mask = create_block_mask(mod, 4, 5, 64, 64, BLOCK_SIZE=16)
    sliced = mask[index]
    assert sliced.shape[:2] == sizes and tuple(sliced.offsets.shape[:2]) == stored
    live = create_mask(mod, 4, 5, 64, 64).view(4, 5, 4, 16, 64)
    for axis, chosen in enumerate(index):
        positions = torch.arange(live.shape[axis]).numpy()[chosen]
        live = live.index_select(axis, torch.as_tensor(positions.copy()).reshape(-1))
    live = live.flatten(2, 3)
    assert torch.equal(create_mask(sliced.mask_mod, *live.shape), live)
    visited = live.view(*sizes, -1, 16, 4, 16).any(5).any(3)
    assert torch.equal(sliced.to_dense(), visited.int())
    with pytest.raises(BlockMaskError, match="batch index 4 is out of range for size 4"):
        mask[4]


def test_a_mask_mod_assigned_to_a_slice_that_is_stored_once_may_read_the_batch_entry() -> None:
    mask = create_block_mask(causal, 4, None, 32, 32, BLOCK_SIZE=16)
    mask.mask_mod = lambda b, h, q, k: q >= k + b
    sliced = mask[2:]
    wanted = create_mask(lambda b, h, q, k: q >= k + b + 2, 2, 1, 32, 32)
    assert torch.equal(create_mask(sliced.mask_mod, 2, 1, 32, 32), wanted)


def test_a_fourth_index_keeps_all_keys() -> None:
    mask = create_block_mask(by_batch_and_head, 2, 3, 70, 90, BLOCK_SIZE=16)
    for keys in (slice(None), slice(0, 6), slice(-6, None), slice(0, 99)):
        assert mask[:, :, -2:, keys] == mask[:, :, -2:]
    for keys in (slice(1, None), slice(0, 5), slice(None, None, 2), 0, [0, 1, 2, 3, 4, 5]):
        with pytest.raises(BlockMaskError, match=r"kv block .*row_slice"):
            mask[:, :, 1, keys]


def test_a_slice_may_be_given_the_shorter_lengths_of_a_step_of_decoding() -> None:
    mask = create_block_mask(causal, None, None, 64, 64, BLOCK_SIZE=16)
    step = mask[:, :, torch.tensor([2])]
    before = hash(step)
    step.mask_mod = lambda b, h, q, k: q + 37 >= k
    step.seq_lengths = (1, 64)
    assert step.shape == (1, 1, 1, 64) and step.views().q_length == 1
    assert hash(step) != before
    query, key = torch.randn(2, 1, 1, 64, 8, dtype=torch.float64).unbind(0)
    out = flex_attention(query[:, :, 37:38], key, key, block_mask=step, backend="reference")
    weights = (query[:, :, 37:38] @ key[:, :, :38].mT * 8**-0.5).softmax(-1)
    torch.testing.assert_close(out, weights @ key[:, :, :38])
    for wrong in ((2, 64), (1, 65), (1, 48), (0, 64)):
        with pytest.raises(BlockMaskError, match=r"seq_lengths .* may only shrink within"):
            step.seq_lengths = wrong
    with pytest.raises(BlockMaskError):
        step.seq_lengths = 1
