"""extend: a mask grows, and is the mask that would have been built for the new lengths."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from anyflex.block_mask import extend
from anyflex.block_mask.block_mask import BlockMask
from anyflex.block_mask.combine import noop_mask
from anyflex.block_mask.create import create_block_mask
from anyflex.errors import BlockMaskError, ModIndexError
from anyflex.testing.mods.leaves import Sizes
from anyflex.testing.mods.mask_mods import MASK_MODS
from tests.core.dense_blocks import block_kinds, check_kinds, dense_mask
from tests.core.given_masks import causal
from tests.soak import SOAK


def untraceable(b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.special.bessel_j0((q - k - b).float()) > 0


def lengths(rng: random.Random, block: tuple[int, int]) -> list[tuple[int, int]]:
    """Growing pairs (q, kv), some of whole blocks, some steps of one element or none."""
    q, kv = rng.randrange(60), rng.randrange(60)
    found = [(q, kv)]
    for _ in range(4):
        q += rng.choice((0, 1, rng.randrange(70), -q % block[0]))
        kv += rng.choice((0, 1, rng.randrange(70), -kv % block[1]))
        found.append((q, kv))
    return found


@pytest.mark.parametrize("name", list(MASK_MODS)[:: 1 if SOAK else 2])
def test_an_extended_mask_of_the_list_is_the_mask_for_the_new_lengths(name: str) -> None:
    rng = random.Random(name + "extend")
    entry = MASK_MODS[name]
    for _ in range(2):
        block = (rng.choice((16, 32, 48, 128)), rng.choice((16, 32, 100, 128)))
        pairs = lengths(rng, block)
        sizes = Sizes(2 if entry.batched else 1, 2 if entry.headed else 1, 1, *pairs[-1])
        # A mod for the longest lengths: its tensors are long enough for all.
        mod = entry.make(sizes, torch.Generator().manual_seed(5)).function()
        make = functools.partial(
            create_block_mask, mod, sizes.batch, sizes.heads, BLOCK_SIZE=block
        )
        mask = make(Q_LEN=pairs[0][0], KV_LEN=pairs[0][1])
        for q, kv in pairs[1:]:
            mask = mask.extend(kv, q)
            wanted = make(Q_LEN=q, KV_LEN=kv)
            assert mask == wanted and hash(mask) == hash(wanted)
            assert mask.mask_mod is mod
        live = dense_mask(mod, sizes.batch, sizes.heads, *pairs[-1])
        check_kinds(mask, block_kinds(live, block))


def test_a_mask_that_cannot_be_traced_is_extended_through_vmap() -> None:
    mask = create_block_mask(untraceable, 2, 1, 20, 30, BLOCK_SIZE=16)
    for q, kv in ((20, 33), (50, 33), (70, 90)):
        mask = mask.extend(kv, q)
        assert mask == create_block_mask(untraceable, 2, 1, q, kv, BLOCK_SIZE=16)


def test_only_new_and_ragged_blocks_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    regions: list[Any] = []
    build = extend.build_region

    def watched(*arguments: Any) -> Any:
        regions.append(arguments[-2:])
        return build(*arguments)

    monkeypatch.setattr(extend, "build_region", watched)
    mask = create_block_mask(causal, 1, 1, 64, 64, BLOCK_SIZE=16)
    assert mask.extend(64) == mask and regions == []
    mask.extend(90)
    assert regions == [((0, 64), (64, 90))]
    regions.clear()
    mask.extend(64, 65)
    assert regions == [((64, 65), (0, 64))]
    regions.clear()
    mask = mask.extend(70, 70)
    assert regions == [((0, 64), (64, 70)), ((64, 70), (0, 70))]
    regions.clear()
    mask.extend(71, 71)  # the ragged row and column of blocks again
    assert regions == [((0, 64), (64, 71)), ((64, 71), (0, 71))]


def test_full_blocks_that_were_ragged_are_decided_again() -> None:
    mask = create_block_mask(lambda b, h, q, k: k < 20, 1, 1, 20, 20, BLOCK_SIZE=16)
    assert mask.views().dense().tolist() == [[[[1, 1], [1, 1]]]]
    assert mask.extend(21).views().dense().tolist() == [[[[1, 2], [1, 2]]]]
    empty = create_block_mask(lambda b, h, q, k: k > 19, 1, 1, 20, 20, BLOCK_SIZE=16)
    assert empty.extend(21).views().dense().tolist() == [[[[0, 2], [0, 2]]]]


def test_a_slice_is_extended_at_its_own_place() -> None:
    mask = create_block_mask(lambda b, h, q, k: q + 16 * h >= k, 1, 3, 64, 64, BLOCK_SIZE=16)
    whole = mask.extend(128, 128)
    assert mask[:, 1:, 1:].extend(128, 112) == whole[:, 1:, 1:]
    step = mask.row_slice(20, 21).extend(100)
    live = dense_mask(whole.mask_mod, 1, 3, 128, 100)[:, :, 20:21]
    assert torch.equal(dense_mask(step.mask_mod, 1, 3, 1, 100), live)
    exact, kinds = block_kinds(live, (16, 16)), step.views().dense()
    assert bool(((kinds == exact) | (kinds == 2)).all())
    assert torch.equal(kinds[..., 4:], exact[..., 4:])  # the new columns
    assert step.seq_lengths == (1, 100)


def test_a_batch_of_the_old_mask_stays() -> None:
    shift = torch.arange(3)
    mask = create_block_mask(lambda b, h, q, k: q + shift[b] >= k, 3, 1, 20, 20, BLOCK_SIZE=16)
    # not true of the old part: the caller vouches for it
    longer = mask.extend(70, 50, mask_mod=causal)
    assert longer.shape == (3, 1, 50, 70)
    kinds = create_block_mask(causal, 3, 1, 50, 70, BLOCK_SIZE=16).views().dense()
    assert torch.equal(longer.views().dense()[:, :, 1:], kinds[:, :, 1:].expand(3, 1, 3, 5))


def test_captured_tensors_may_have_grown() -> None:
    documents = torch.arange(200) // 30
    make = lambda table: lambda b, h, q, k: table[q] == table[k]  # noqa: E731
    mask = create_block_mask(make(documents[:70].clone()), 1, 1, 70, 70, BLOCK_SIZE=16)
    with pytest.raises(ModIndexError, match=r"shape \[70\]"):
        mask.extend(130, 130)
    longer = mask.extend(130, 130, mask_mod=make(documents))
    assert longer == create_block_mask(make(documents), 1, 1, 130, 130, BLOCK_SIZE=16)


def given(mask_mod: Any, q: int, kv: int) -> BlockMask:
    """A structure of one block, PARTIAL where there is a mask mod and FULL where there is none."""
    return BlockMask.from_runs(
        torch.tensor([[[0, 1]]], dtype=torch.int32),
        torch.tensor([[0, 1, 2 if mask_mod else 1]], dtype=torch.int32),
        seq_lengths=(q, kv),
        block_size=16,
        mask_mod=mask_mod,
    )


def test_a_given_structure_is_extended_by_whole_blocks_only() -> None:
    assert given(noop_mask, 16, 16).extend(32).views().dense().tolist() == [[[[2, 1]]]]
    assert given(noop_mask, 9, 16).extend(32).views().dense().tolist() == [[[[2, 1]]]]
    for mask, new in ((given(noop_mask, 16, 9), (32, 16)), (given(noop_mask, 9, 16), (16, 20))):
        with pytest.raises(BlockMaskError, match="end inside of a block.*was not built"):
            mask.extend(*new)
    assert given(None, 16, 16).extend(32, mask_mod=causal).views().dense().tolist() == [[[[1, 0]]]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((63,), r"kv_len must be at least the mask's KV_LEN, 64, got 63; row_slice\(\)"),
        ((64, 63), "q_len must be at least the mask's Q_LEN, 64, got 63"),
        ((64.5,), "kv_len must be an int, got 64.5"),
        ((None,), "kv_len must be an int, got None"),
        ((64, -1), "q_len must be in 0"),
        ((2**31,), "kv_len must be in 0"),
    ],
)
def test_wrong_lengths_are_named(arguments: Any, message: str) -> None:
    mask = create_block_mask(causal, None, None, 64, 64, BLOCK_SIZE=16)
    with pytest.raises(BlockMaskError, match=message):
        mask.extend(*arguments)


def test_a_mask_mod_that_cannot_decide_is_named() -> None:
    with pytest.raises(BlockMaskError, match="has no mask_mod.*pass mask_mod="):
        given(None, 16, 16).extend(32)
    mask = create_block_mask(causal, 4, 4, 64, 64, BLOCK_SIZE=16)
    with pytest.raises(BlockMaskError, match="mask_mod reads b.*one for all batch entries"):
        mask.extend(70, mask_mod=lambda b, h, q, k: q + b >= k)
    with pytest.raises(BlockMaskError, match="mask_mod reads h.*one for all heads"):
        mask.extend(70, mask_mod=lambda b, h, q, k: q + h >= k)
    with pytest.raises(BlockMaskError, match="int64.*!= 0"):
        mask.extend(70, mask_mod=lambda b, h, q, k: q - k)
