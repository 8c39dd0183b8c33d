"""row_slice: the mask of a range of query rows, for decoding and chunked prefill."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.block_mask.block_mask import BlockMask
from anyflex.block_mask.combine import noop_mask
from anyflex.block_mask.create import create_block_mask
from anyflex.block_mask.row_slicing import row_range
from anyflex.errors import BlockMaskError
from anyflex.testing.mods.leaves import Sizes
from anyflex.testing.mods.mask_mods import MASK_MODS
from tests.core.dense_blocks import check_kinds, dense_mask, random_case
from tests.core.given_masks import by_batch_and_head, causal
from tests.soak import SOAK


def untraceable(b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.special.bessel_j0((q - k).float()) > 0


def sliced_kinds(kinds: Tensor, block: int, start: int, stop: int) -> Tensor:
    """Expected blocks of a slice, element row by element row: kinds int8 [B, H, Qb, Kb]."""
    rows = kinds[:, :, torch.arange(start, stop) // block]
    parts = []
    for begin in range(0, stop - start, block):
        part = rows[:, :, begin : begin + block]
        full, empty = (part == 1).all(2), (part == 0).all(2)
        parts.append(torch.where(full, 1, torch.where(empty, 0, 2)))
    if not parts:
        return kinds[:, :, :0]
    return torch.stack(parts, 2).to(torch.int8)


def ranges(rng: random.Random, q: int, block: int) -> list[tuple[int, int]]:
    """Ranges of rows: aligned or not, one row, none, all."""
    aligned = rng.randrange(q) // block * block
    some = sorted(rng.randrange(q + 1) for _ in range(2))
    one = rng.randrange(q)
    end = rng.randint(aligned, q)
    return [(aligned, end), (some[0], some[1]), (one, one + 1), (one, one), (0, q), (one, q)]


@pytest.mark.parametrize("name", list(MASK_MODS)[:: -1 if SOAK else -2])
def test_a_row_slice_of_every_mask_of_the_list_has_the_blocks_of_its_rows(name: str) -> None:
    rng = random.Random(name + "rows")
    entry = MASK_MODS[name]
    q, kv, block = random_case(rng)
    sizes = Sizes(2 if entry.batched else 1, 2 if entry.headed else 1, 1, q, kv)
    mod = entry.make(sizes, torch.Generator().manual_seed(5)).function()
    mask = create_block_mask(mod, sizes.batch, sizes.heads, q, kv, BLOCK_SIZE=block)
    kinds = mask.views().dense()
    live = dense_mask(mod, sizes.batch, sizes.heads, q, kv)
    for start, stop in ranges(rng, q, block[0]):
        sliced = mask.row_slice(start, stop)
        assert sliced.seq_lengths == (stop - start, kv)
        check_kinds(sliced, sliced_kinds(kinds, block[0], start, stop))
        wanted = live[:, :, start:stop]
        assert torch.equal(dense_mask(sliced.mask_mod, *wanted.shape), wanted)
        # A slice of a slice is a slice of the whole.
        middle = rng.randint(start, stop)
        again = sliced.row_slice(middle - start, stop - start)
        assert again.seq_lengths == (stop - middle, kv)
        assert again.traced.text == sliced.traced.text
        wanted = live[:, :, middle:stop]
        assert torch.equal(dense_mask(again.mask_mod, *wanted.shape), wanted)


@pytest.mark.parametrize("seed", range(20))
def test_a_row_slice_may_keep_the_first_keys_only(seed: int) -> None:
    rng = random.Random(seed)
    q, kv, block = random_case(rng)
    mask = create_block_mask(by_batch_and_head, 2, 2, q, kv, BLOCK_SIZE=block)
    kinds = mask.views().dense()
    for start, stop in ranges(rng, q, block[0]):
        length = rng.randrange(kv + 1)
        sliced = mask.row_slice(start, stop, kv_len=length)
        assert sliced.seq_lengths == (stop - start, length)
        columns = -(-length // block[1])
        check_kinds(sliced, sliced_kinds(kinds, block[0], start, stop)[..., :columns])


@pytest.mark.parametrize("mod", [by_batch_and_head, untraceable])
@pytest.mark.parametrize("chunk", [1, 7, 16, 32, 45])
def test_attention_by_chunks_of_rows_is_attention(mod: Any, chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn((2, 2, 75, 8), generator=generator, dtype=torch.float64)
    key, value = (
        torch.randn((2, 2, 90, 8), generator=generator, dtype=torch.float64) for _ in "kv"
    )
    mask = create_block_mask(mod, 2, 2, 75, 90, BLOCK_SIZE=16)
    whole = anyflex.flex_attention(query, key, value, block_mask=mask, backend="reference")
    parts = []
    for start in range(0, 75, chunk):
        stop = min(start + chunk, 75)
        parts.append(
            anyflex.flex_attention(
                query[:, :, start:stop],
                key,
                value,
                block_mask=mask.row_slice(start, stop),
                backend="reference",
            )
        )
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=1e-12, atol=1e-12)


def test_decoding_steps_share_one_graph_and_a_kernel() -> None:
    mask = create_block_mask(causal, None, None, 64, 64, BLOCK_SIZE=16)
    steps = [mask.row_slice(t, t + 1) for t in range(64)]
    assert len({step.traced.text for step in steps}) == 1
    assert [step.traced.ints for step in steps] == [[t] for t in range(64)]
    full = create_block_mask(noop_mask, None, None, 64, 64, BLOCK_SIZE=16)
    assert full.row_slice(3, 9).traced.text == full.traced.text


def test_a_mod_that_adds_a_number_to_its_row_gets_no_second_one() -> None:
    mask = create_block_mask(lambda b, h, q, k: q + 5 >= k, 1, 1, 64, 64, BLOCK_SIZE=16)
    sliced = mask.row_slice(20, 30)
    assert sliced.traced.text == mask.traced.text and sliced.traced.ints == [25]
    # A number so large that the sum would not fit stays unchanged.
    large = create_block_mask(
        lambda b, h, q, k: q + (2**63 - 1) < k, 1, 1, 64, 64, BLOCK_SIZE=16
    ).row_slice(20, 30)
    assert large.traced.ints == [2**63 - 1, 20]
    # A number that is used elsewhere too is another number.
    twice = create_block_mask(lambda b, h, q, k: (q + 5 >= k) & (q > 3), 1, 1, 64, 64)
    assert twice.row_slice(20, 30).traced.ints == [5, 3, 20]


def test_a_slice_of_one_block_is_legal_whatever_the_structure_says() -> None:
    offsets = torch.tensor([[[0, 1, 2]]], dtype=torch.int32)
    runs = torch.tensor([[0, 1, 1], [0, 2, 2]], dtype=torch.int32)
    mask = BlockMask.from_runs(offsets, runs, seq_lengths=(32, 32), block_size=16, mask_mod=causal)
    assert mask.row_slice(3, 9).views().dense().tolist() == [[[[1, 0]]]]
    assert mask.row_slice(16, 30).views().dense().tolist() == [[[[2, 2]]]]
    with pytest.raises(BlockMaskError, match=r"rows 8:24 begin inside.*row \[0, 0, 0\].*was not"):
        mask.row_slice(8, 24)
    alike = BlockMask.from_runs(
        offsets[:, :, [0, 1, 1]] * 0 + torch.arange(3, dtype=torch.int32),
        torch.tensor([[0, 1, 1], [0, 1, 1]], dtype=torch.int32),
        seq_lengths=(32, 32),
        block_size=16,
    )
    assert alike.row_slice(8, 24).views().dense().tolist() == [[[[1, 0]]]]
    assert alike.row_slice(8, 24).mask_mod is None


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ((3, 2), {}, "rows 3:2 are no range of the mask's 64 rows"),
        ((0, 65), {}, r"rows 0:65 .*extend\(\)"),
        ((-1, 5), {}, "start must be in 0"),
        ((0.0, 5), {}, "start must be an int, got 0.0 of type float"),
        ((0, True), {}, "stop must be an int"),
        ((0, 5), {"kv_len": 65}, r"kv_len 65 is more than the mask's KV_LEN 64: use extend\(\)"),
        ((0, 5), {"kv_len": "all"}, "kv_len must be an int, got 'all'"),
    ],
)
def test_a_wrong_range_of_rows_is_named(rows: Any, options: Any, message: str) -> None:
    mask = create_block_mask(causal, None, None, 64, 64, BLOCK_SIZE=16)
    with pytest.raises(BlockMaskError, match=message):
        mask.row_slice(*rows, **options)


def test_rows_on_another_device_keep_their_copy_on_the_host() -> None:
    mask = create_block_mask(by_batch_and_head, 2, 3, 70, 90, BLOCK_SIZE=16)
    elsewhere = mask.views().on(torch.device("meta"))
    for start, stop in ((16, 48), (5, 6), (3, 60)):
        taken, _ = row_range(elsewhere, start, stop, 90)
        here, _ = row_range(mask.views(), start, stop, 90)
        assert taken.device.type == "meta"
        host = taken.on(torch.device("cpu"))
        assert torch.equal(host.offsets, here.offsets) and torch.equal(host.runs, here.runs)


@pytest.mark.parametrize("sizes", [(0, 2, 40, 40), (2, 0, 40, 40), (2, 2, 0, 40), (2, 2, 40, 0)])
def test_rows_of_empty_masks_are_legal(sizes: tuple[int, int, int, int]) -> None:
    mask = create_block_mask(by_batch_and_head, *sizes, BLOCK_SIZE=16)
    for start, stop in ((0, 0), (0, 20), (16, 40), (5, 6), (5, 40)):
        if stop > sizes[2]:
            continue
        sliced = mask.row_slice(start, stop)
        assert sliced.shape == (*sizes[:2], stop - start, sizes[3])
        assert mask.row_slice(start, stop, kv_len=0).seq_lengths == (stop - start, 0)
        longer = sliced.extend(60, 60)
        assert longer.shape == (*sizes[:2], 60, 60)


def test_rows_of_a_mask_with_room_for_more_runs_are_its_rows() -> None:
    made = create_block_mask(causal, 1, 1, 70, 70, BLOCK_SIZE=16)
    roomy = BlockMask.from_runs(
        made.offsets,
        made.runs,
        seq_lengths=(70, 70),
        block_size=16,
        mask_mod=causal,
        capacity=500,
    )
    roomy.runs.data[made.runs.shape[0] :] = 77  # past the used runs: it means nothing
    for rows in ((0, 70), (16, 40), (69, 70)):
        assert roomy.row_slice(*rows) == made.row_slice(*rows)
        assert hash(roomy.row_slice(*rows)) == hash(made.row_slice(*rows))


@pytest.mark.parametrize("kv_len", [None, 1, 40, 64, 67, 90])
def test_slices_are_those_of_a_fresh_mask_in_any_order(kv_len: int | None) -> None:
    rng = random.Random(7)
    ids = torch.arange(90) // 17

    def make() -> BlockMask:
        return create_block_mask(
            lambda b, h, q, k: (q >= k - 5 * h) & (ids[q] == ids[k]), 1, 2, 90, 90, BLOCK_SIZE=16
        )

    mask = make()
    for _ in range(60):
        start, stop = sorted(rng.randrange(91) for _ in range(2))
        if rng.random() < 0.6:
            start, stop = min(start, 89), min(start, 89) + 1
        length = kv_len if kv_len is None else min(90, kv_len + rng.randrange(3))
        found = mask.row_slice(start, stop, kv_len=length)
        wanted = make().row_slice(start, stop, kv_len=length)
        assert found == wanted and found.views().kv_length == (length or 90)
        assert torch.equal(found.views().dense(), wanted.views().dense())


def test_steps_in_one_block_share_their_structure_and_others_are_dropped() -> None:
    mask = create_block_mask(causal, None, None, 64, 64, BLOCK_SIZE=16)
    first, second = mask.row_slice(17, 18), mask.row_slice(30, 31)
    assert first.views() is second.views() and first != mask.row_slice(32, 33)
    longer = mask.row_slice(17, 18, kv_len=40), mask.row_slice(30, 31, kv_len=41)
    assert longer[0].runs is longer[1].runs and longer[0].shape != longer[1].shape
    kept = weakref.ref(first.views())
    del first, second
    mask.row_slice(40, 41)
    gc.collect()
    assert kept() is None
