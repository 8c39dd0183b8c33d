"""Conversion from and to torch's BlockMask, for the layouts of several torch versions.

``tests/data/torch_block_mask_*.json`` record which attributes a version's BlockMask has, of which
types, and how many items its tuple.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import anyflex
from anyflex.block_mask.block_mask import BlockMask
from anyflex.block_mask.combine import noop_mask
from anyflex.block_mask.create import create_block_mask
from anyflex.errors import ArgumentTypeError, BlockMaskError
from anyflex.frontend.torch_masks import converted
from anyflex.testing.mods.leaves import Sizes
from anyflex.testing.mods.mask_mods import MASK_MODS
from tests.core.dense_blocks import block_kinds, check_kinds, dense_mask, random_case

DATA = Path(__file__).parent.parent / "data"
VERSIONS = ("2.11", "2.13", "2.14", "2.15")
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def recorded(version: str) -> dict[str, Any]:
    layout: dict[str, Any] = json.loads((DATA / f"torch_block_mask_{version}.json").read_text())
    return layout


def torch_causal(q: int = 64, kv: int = 64, block: Any = 16) -> Any:
    return torch_flex.create_block_mask(causal, 1, 1, q, kv, device="cpu", BLOCK_SIZE=block)


def stand_in(version: str, source: Any, **changes: Any) -> Any:
    """An object with exactly the attributes that this version's BlockMask has."""
    layout = recorded(version)
    values = {name: getattr(source, name, None) for name in layout["attributes"]} | changes
    kind = type(
        "BlockMask",
        (),
        {
            "__module__": "torch.nn.attention.flex_attention",
            "_TENSOR_ATTRS": layout["tensor_attributes"],
            "_CONTEXT_ATTRS": layout["context_attributes"],
        },
    )
    mask = kind()
    vars(mask).update(values)
    return mask


def test_the_recorded_layouts_have_the_items_of_each_torch() -> None:
    counts = {version: recorded(version)["tuple_items"] for version in VERSIONS}
    assert counts == {"2.11": 13, "2.13": 17, "2.14": 17, "2.15": 17}
    for version in VERSIONS:
        layout = recorded(version)
        declared = {*layout["tensor_attributes"], *layout["context_attributes"]}
        assert declared == set(layout["attributes"])


def test_the_installed_torch_has_the_layout_recorded_for_it() -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in VERSIONS:
        pytest.skip(f"no layout is recorded for torch {version}")
    layout = recorded(version)
    mask = torch_causal()
    assert layout["tensor_attributes"] == torch_flex.BlockMask._TENSOR_ATTRS
    assert layout["context_attributes"] == torch_flex.BlockMask._CONTEXT_ATTRS
    assert set(vars(mask)) == set(layout["attributes"])
    assert len(mask.as_tuple()) == layout["tuple_items"]
    for name, kind in layout["attributes"].items():
        value = getattr(mask, name)
        if kind.startswith("Tensor") and value is not None:
            assert isinstance(value, torch.Tensor) and value.dtype is torch.int32
        elif kind == "tuple[int, int]":
            assert isinstance(value, tuple) and len(value) == 2


@pytest.mark.parametrize("version", VERSIONS)
def test_a_mask_of_each_recorded_version_is_read(version: str) -> None:
    mask = stand_in(version, torch_causal())
    assert BlockMask.from_torch(mask) == create_block_mask(causal, 1, 1, 64, 64, BLOCK_SIZE=16)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_mask_without_full_blocks_and_without_transposes_is_read(version: str) -> None:
    absent = dict.fromkeys(recorded(version)["attributes"])
    for name in ("seq_lengths", "BLOCK_SIZE", "mask_mod", "kv_num_blocks", "kv_indices"):
        del absent[name]
    # Row r lists its r + 1 blocks, all of them as PARTIAL.
    counts = torch.arange(1, 5, dtype=torch.int32).view(1, 1, 4)
    columns = torch.arange(4, dtype=torch.int32).expand(1, 1, 4, 4)
    source = torch_flex.BlockMask.from_kv_blocks(
        counts, columns.contiguous(), BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(64, 64)
    )
    mask = BlockMask.from_torch(stand_in(version, source, **absent))
    assert torch.equal(mask.views().kind_rows(0, 4)[0, 0], 2 * torch.ones(4, 4).tril().char())


def test_lists_with_fewer_columns_than_the_lengths_have_blocks_are_read() -> None:
    """torch makes the transposes of such lists since 2.14."""
    counts = torch.tensor([[[1, 2, 2, 1]]], dtype=torch.int32)
    columns = torch.tensor([[[[0, 1], [0, 1], [1, 2], [3, 0]]]], dtype=torch.int32)
    source = torch_flex.BlockMask.from_kv_blocks(
        counts, columns, BLOCK_SIZE=16, seq_lengths=(64, 64), compute_q_blocks=False
    )
    mask = BlockMask.from_torch(source)
    wanted = torch.tensor([[2, 0, 0, 0], [2, 2, 0, 0], [0, 2, 2, 0], [0, 0, 0, 2]])
    assert torch.equal(mask.views().kind_rows(0, 4)[0, 0], wanted.char())
    assert mask.sparsity() == pytest.approx(100 * (1 - 6 / 16))


def test_orders_of_deterministic_accumulation_do_not_change_the_mask() -> None:
    extra = {"dq_write_order": torch.zeros(1), "dq_kv_order_spt": True}
    mask = stand_in("2.15", torch_causal(), **extra)
    assert BlockMask.from_torch(mask) == BlockMask.from_torch(torch_causal())


def test_a_layout_with_an_unknown_field_is_refused() -> None:
    mask = stand_in("2.15", torch_causal())
    type(mask)._TENSOR_ATTRS = [*type(mask)._TENSOR_ATTRS, "kv_offsets"]
    mask.kv_offsets = None
    BlockMask.from_torch(mask)
    mask.kv_offsets = torch.zeros(4)
    with pytest.raises(BlockMaskError, match=r"field 'kv_offsets'.*upgrade"):
        BlockMask.from_torch(mask)


@pytest.mark.parametrize("missing", ["seq_lengths", "BLOCK_SIZE", "mask_mod", "kv_indices"])
def test_a_layout_without_a_needed_field_is_refused(missing: str) -> None:
    mask = stand_in("2.11", torch_causal())
    delattr(mask, missing)
    with pytest.raises(ArgumentTypeError, match=rf"no attribute {missing}"):
        BlockMask.from_torch(mask)


def test_something_else_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"object has no attribute seq_lengths"):
        BlockMask.from_torch(object())


@pytest.mark.parametrize("name", MASK_MODS)
def test_both_directions_agree_with_torch_on_every_mask_of_the_list(name: str) -> None:
    rng = random.Random(name + "torch")
    q, kv, block = random_case(rng)
    entry = MASK_MODS[name]
    sizes = Sizes(2 if entry.batched else 1, 2 if entry.headed else 1, 1, q, kv)
    mod = entry.make(sizes, torch.Generator().manual_seed(7)).function()
    theirs = torch_flex.create_block_mask(
        mod, sizes.batch, sizes.heads, q, kv, device="cpu", BLOCK_SIZE=block
    )
    ours = create_block_mask(mod, sizes.batch, sizes.heads, q, kv, BLOCK_SIZE=block)
    made = ours.to_torch()
    for attribute in (*LISTS, "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
        assert torch.equal(getattr(made, attribute), getattr(theirs, attribute)), attribute
    assert made.seq_lengths == theirs.seq_lengths and made.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert made.mask_mod is mod
    assert ours.to_string() == theirs.to_string()
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    # Read back, the blocks are torch's: a ragged block is PARTIAL there, which means the same.
    read = BlockMask.from_torch(theirs)
    live = dense_mask(mod, sizes.batch, sizes.heads, q, kv)
    kinds = block_kinds(live, block)
    if q % block[0]:
        kinds[:, :, -1] *= 1 + (kinds[:, :, -1] == 1)
    if kv % block[1]:
        kinds[..., -1] *= 1 + (kinds[..., -1] == 1)
    check_kinds(read, kinds)
    assert read.traced is not None and ours.traced is not None
    assert read.traced.text == ours.traced.text


@pytest.mark.parametrize("sizes", [(4, 2), (None, 2), (4, None)])
@pytest.mark.parametrize("mod", [causal, lambda b, h, q, k: q + 16 * h >= k])
def test_torchs_mask_has_the_batch_and_heads_that_were_asked_for(mod: Any, sizes: Any) -> None:
    made = create_block_mask(mod, *sizes, 64, 50, BLOCK_SIZE=16).to_torch()
    theirs = torch_flex.create_block_mask(mod, *sizes, 64, 50, device="cpu", BLOCK_SIZE=16)
    assert made.shape == theirs.shape
    for attribute in (*LISTS, "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
        ours, wanted = getattr(made, attribute), getattr(theirs, attribute)
        assert torch.equal(ours, wanted) and ours.is_contiguous(), attribute
    assert BlockMask.from_torch(made).shape == theirs.shape
    again = create_block_mask(mod, *sizes, 64, 50, BLOCK_SIZE=16)
    for attribute in (*LISTS, "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
        assert torch.equal(getattr(again, attribute), getattr(theirs, attribute)), attribute
        assert getattr(again, attribute) is getattr(again, attribute)
        with pytest.raises(AttributeError):
            setattr(again, attribute, getattr(theirs, attribute))
    for flatten in (True, False):
        for ours, wanted in zip(again.as_tuple(flatten), theirs.as_tuple(flatten), strict=True):
            assert torch.equal(ours, wanted) if torch.is_tensor(wanted) else ours == wanted
    assert BlockMask.from_torch(again) is again
    assert torch.equal(made[-1, -1].kv_num_blocks, theirs[-1, -1].kv_num_blocks)


def test_a_mask_made_of_full_runs_alone_converts_without_a_mask_mod() -> None:
    offsets = torch.tensor([[[0, 1, 2]]], dtype=torch.int32)
    runs = torch.tensor([[0, 1, 1], [0, 2, 1]], dtype=torch.int32)
    mask = BlockMask.from_runs(offsets, runs, seq_lengths=(20, 30), block_size=16)
    made = mask.to_torch()
    assert made.full_kv_num_blocks.tolist() == [[[1, 0]]]
    assert made.kv_num_blocks.tolist() == [[[0, 2]]]
    assert made.mask_mod(*torch.zeros(4, 1).unbind(0)).item() is True


@pytest.mark.parametrize("sizes", [(0, 1, 9, 9), (1, 0, 9, 9), (1, 1, 0, 9), (1, 1, 9, 0)])
def test_empty_masks_convert_both_ways(sizes: tuple[int, int, int, int]) -> None:
    mod = lambda b, h, q, k: q + b + h >= k  # noqa: E731
    mask = create_block_mask(mod, *sizes, BLOCK_SIZE=4)
    made = mask.to_torch()
    assert BlockMask.from_torch(made).shape == sizes


def test_a_torch_mask_of_lower_rank_is_read() -> None:
    source = torch_causal()
    mask = stand_in("2.13", source, **{name: getattr(source, name)[0, 0] for name in LISTS})
    assert BlockMask.from_torch(mask) == BlockMask.from_torch(source)


def test_a_slice_of_a_torch_mask_needs_a_mask_mod() -> None:
    source = torch_flex.create_block_mask(
        lambda b, h, q, k: q + b >= k, 2, 1, 64, 64, device="cpu", BLOCK_SIZE=16
    )
    mask = BlockMask.from_torch(source[1])
    assert mask.needs_mask_mod and mask.traced is None
    mask.mask_mod = lambda b, h, q, k: q + 1 >= k
    assert not mask.needs_mask_mod and mask.traced is not None


def test_rows_that_do_not_fit_the_lengths_are_named() -> None:
    mask = stand_in("2.13", torch_causal(), seq_lengths=(128, 64))
    with pytest.raises(BlockMaskError, match="has 4 rows.*Q_LEN 128 has 8"):
        BlockMask.from_torch(mask)


def test_a_torch_mask_is_converted_once_until_it_changes() -> None:
    source = torch_causal()
    mask = converted(source)
    assert converted(source) is mask
    source.mask_mod = noop_mask
    assert converted(source) is not mask
    mask = converted(source)
    source.kv_num_blocks.zero_()
    assert int(converted(source).views().kind_rows(0, 4).eq(2).sum()) == 0


def test_a_torch_mask_is_converted_inside_of_a_compiled_graph() -> None:
    documents = torch.arange(70) // 30
    mod = lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k - b)  # noqa: E731
    source = torch_flex.create_block_mask(mod, 2, 1, 70, 70, device="cpu", BLOCK_SIZE=(16, 8))
    wanted = BlockMask.from_torch(source)

    @torch.compile(backend="eager", fullgraph=True)
    def convert(mask: Any) -> Any:
        made = converted(mask)
        return made.offsets, made.runs, made.traced.captured

    offsets, runs, captured = convert(source)
    used = int(wanted.offsets[-1, -1, -1])
    assert torch.equal(offsets, wanted.offsets)
    assert torch.equal(runs[:used], wanted.runs[:used])
    assert captured[0] is documents


def test_a_mask_on_meta_is_refused_by_name() -> None:
    mask = torch_flex.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, 20, 20, device="cpu"
    ).to("meta")
    query = torch.randn(1, 1, 20, 8)
    for read in (
        lambda: BlockMask.from_torch(mask),
        lambda: anyflex.flex_attention(query, query, query, block_mask=mask),
    ):
        with pytest.raises(BlockMaskError, match="kv_num_blocks is on meta.*has no values"):
            read()
