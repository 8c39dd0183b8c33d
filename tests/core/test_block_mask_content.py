"""Block masks as content: equal, hashed, pickled, copied, moved."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path

import pytest
import torch

from anyflex.block_mask.block_mask import BlockMask
from anyflex.block_mask.combine import and_masks
from anyflex.block_mask.create import create_block_mask
from anyflex.block_mask.mask_function import RebuiltMaskMod
from anyflex.block_mask.mask_state import FORMAT
from anyflex.errors import BlockMaskError
from tests.core.dense_blocks import dense_mask
from tests.core.given_masks import (
    causal,
    untraceable,
)


def test_equality_is_by_meaning_and_equal_masks_hash_alike() -> None:
    documents = torch.arange(40) // 10
    make = functools.partial(create_block_mask, B=1, H=1, Q_LEN=40, KV_LEN=40, BLOCK_SIZE=16)
    mod = lambda b, h, q, k: documents[q] == documents[k]  # noqa: E731
    mask, again = make(mod), make(mod)
    assert mask == again and hash(mask) == hash(again) and mask != 3
    padded = BlockMask.from_runs(
        mask.offsets, mask.runs, seq_lengths=(40, 40), block_size=16, mask_mod=mod, capacity=99
    )
    assert padded == mask and hash(padded) == hash(mask)
    other = documents.clone()
    same_blocks = lambda b, h, q, k: other[q] == other[k]  # noqa: E731
    assert make(same_blocks) == mask
    other[3] += 9
    assert make(same_blocks) != mask
    assert make(causal) != mask
    assert make(causal, BLOCK_SIZE=8) != make(causal)
    assert make(lambda b, h, q, k: q - 1 >= k) != make(lambda b, h, q, k: q - 2 >= k)
    assert make(causal, Q_LEN=41) != make(causal)


def test_a_mask_keeps_its_hash_wherever_it_is() -> None:
    table = torch.tensor([0.5, float("nan"), -0.0] * 14)
    make = lambda table: create_block_mask(  # noqa: E731
        lambda b, h, q, k: (table[q] == table[k]) | (q > k), 1, 1, 40, 40, BLOCK_SIZE=16
    )
    mask = make(table)
    moved = mask.to("meta")
    assert hash(moved) == hash(mask) and moved == moved and moved != mask  # it has no values
    assert {mask: 1}[pickle.loads(pickle.dumps(mask))] == 1
    assert make(table.clone()) == mask
    assert make(torch.where(table == 0, 0.0, table)) != mask  # 0.0 is not -0.0
    assert make(table.double()) != mask
    mask.mask_mod = causal
    assert hash(mask) == hash(moved) and mask != make(table)
    nan = lambda x: lambda b, h, q, k: q * x >= k  # noqa: E731
    masks = [
        create_block_mask(nan(x), 1, 1, 8, 8) for x in (float("nan"), float("nan"), -0.0, 0.0)
    ]
    assert masks[0] == masks[1] and masks[2] != masks[3]


def test_masks_of_other_runs_hash_apart() -> None:
    masks = [
        create_block_mask(lambda b, h, q, k: q + 16 * i >= k, 1, 1, 64, 64, BLOCK_SIZE=16)  # noqa: B023
        for i in range(4)
    ]
    assert len({hash(mask) for mask in masks}) == len(set(masks)) == 4
    lengths = [create_block_mask(causal, 1, 1, q, kv, BLOCK_SIZE=16) for q, kv in ((8, 9), (9, 8))]
    assert hash(lengths[0]) != hash(lengths[1])


def test_masks_that_cannot_be_traced_are_equal_if_their_functions_are_the_same() -> None:
    make = functools.partial(create_block_mask, B=2, H=3, Q_LEN=40, KV_LEN=40, BLOCK_SIZE=16)
    mask = make(untraceable)
    assert mask == make(untraceable) and mask[1, 2, 1:] == make(untraceable)[1, 2, 1:]
    assert mask[:, :, 1:][:, :, 1:] == mask[:, :, 2:] and mask[0, 1] != mask[1, 1]
    assert mask[:, [2, 0]] == mask[:, torch.tensor([2, 0])] != mask[:, [0, 2]]
    assert hash(mask[:, [2, 0]].opaque) == hash(mask[:, torch.tensor([2, 0])].opaque)
    assert make(lambda b, h, q, k: untraceable(b, h, q, k)) != mask


def test_a_pickled_mask_comes_back_with_its_mask_mod_as_data() -> None:
    documents = torch.arange(40) // 10
    mask = create_block_mask(
        lambda b, h, q, k: (documents[q] == documents[k]) & (q - 3 >= k), 1, 1, 40, 40
    )
    back = pickle.loads(pickle.dumps(mask))
    assert back == mask and isinstance(back.mask_mod, RebuiltMaskMod)
    rebuilt = create_block_mask(back.mask_mod, 1, 1, 40, 40)
    live = (documents[:, None] == documents) & (torch.arange(40)[:, None] - 3 >= torch.arange(40))
    assert torch.equal(dense_mask(back.to_torch().mask_mod, 1, 1, 40, 40)[0, 0], live)
    assert torch.equal(rebuilt.runs, mask.runs)
    q, k = torch.arange(40)[:, None], torch.arange(40)
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(
        back.mask_mod(zero, zero, q, k), (documents[q] == documents[k]) & (q - 3 >= k)
    )
    assert torch.equal(
        create_block_mask(and_masks(back.mask_mod, causal), 1, 1, 40, 40).runs, mask.runs
    )


def test_a_pickle_of_another_format_names_both() -> None:
    mask = create_block_mask(causal, 1, 1, 8, 8)
    state = mask.__getstate__()
    assert state["format"] == FORMAT == 2
    for format_ in (0, 1, None):
        with pytest.raises(BlockMaskError, match=rf"format {format_}, .* reads format 2"):
            BlockMask.__new__(BlockMask).__setstate__({**state, "format": format_})
    with pytest.raises(BlockMaskError, match="format None"):
        BlockMask.__new__(BlockMask).__setstate__({})


def test_a_saved_mask_loads_as_plain_data(tmp_path: Path) -> None:
    documents = torch.arange(40) // 10
    mask = create_block_mask(lambda b, h, q, k: documents[q] == documents[k], 1, 1, 40, 40)
    torch.save(mask, tmp_path / "mask.pt")
    assert torch.load(tmp_path / "mask.pt", weights_only=True) == mask


def test_a_deep_copy_shares_nothing() -> None:
    table = torch.ones(40, dtype=torch.bool)
    mask = create_block_mask(lambda b, h, q, k: table[k], 1, 1, 40, 40)
    twin = copy.deepcopy(mask)
    assert twin == mask
    table.zero_()
    twin.views()
    assert twin.traced is not None and bool(twin.traced.captured[0].all())
    assert copy.copy(twin) == twin


def test_a_mask_moves_with_its_captured_tensors_once() -> None:
    table = torch.ones(40, dtype=torch.bool)
    mask = create_block_mask(lambda b, h, q, k: table[k], 1, 1, 40, 40)
    assert mask.to("cpu") is mask and mask.on(torch.device("cpu")) is mask
    moved = mask.on(torch.device("meta"))
    assert mask.on(torch.device("meta")) is moved and moved.device.type == "meta"
    assert moved.traced is not None and moved.traced.captured[0].device.type == "meta"
    assert isinstance(moved.mask_mod, RebuiltMaskMod)
    mask.mask_mod = causal
    assert mask.on(torch.device("meta")) is not moved
    with pytest.raises(BlockMaskError, match="on meta.*move to cpu"):
        moved.to("cpu")
    with pytest.raises(BlockMaskError, match="device 'warp'"):
        mask.to("warp")
