"""BlockMask: its checks, views, copies and slices."""

from __future__ import annotations

import functools
import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from anyflex.block_mask.block_mask import BlockMask
from anyflex.block_mask.combine import noop_mask
from anyflex.block_mask.create import create_block_mask
from anyflex.errors import AnyflexError, BlockMaskError
from anyflex.mask_structure import to_index_lists
from anyflex.mask_structure.device_views import FULL, PARTIAL, MaskViews
from anyflex.mask_structure.to_index_lists import IndexLists
from tests.core.dense_blocks import check_kinds, written_kinds
from tests.core.given_masks import (
    by_batch_and_head,
    causal,
    int32,
    lists_mask,
    runs_mask,
)


def random_grid(rng: random.Random, batch: int, heads: int, rows: int, columns: int) -> Tensor:
    grid = torch.zeros(batch, heads, rows, columns, dtype=torch.int8)
    weights = rng.choice([(8, 1, 1), (1, 8, 1), (1, 1, 1)])
    for b in range(batch):
        for h in range(heads):
            for row in range(rows):
                grid[b, h, row] = torch.tensor(rng.choices((0, 1, 2), weights, k=columns))
    return grid


def grid_runs(grid: Tensor) -> tuple[Tensor, Tensor]:
    """offsets and one run a block: legal, not merged."""
    batch, heads, rows, _ = grid.shape
    runs, offsets = [], torch.zeros(batch, heads, rows + 1, dtype=torch.int32)
    for b in range(batch):
        for h in range(heads):
            offsets[b, h, 0] = len(runs)
            for row in range(rows):
                line = grid[b, h, row].tolist()
                runs += [(i, i + 1, kind) for i, kind in enumerate(line) if kind]
                offsets[b, h, row + 1] = len(runs)
    return offsets, int32(runs).view(-1, 3)


@pytest.mark.parametrize("seed", range(40))
def test_any_runs_are_merged_transposed_and_listed_rightly(seed: int) -> None:
    rng = random.Random(seed)
    batch, heads = rng.randint(1, 3), rng.randint(1, 3)
    rows, columns = rng.randint(1, 12), rng.randint(1, 12)
    grid = random_grid(rng, batch, heads, rows, columns)
    offsets, runs = grid_runs(grid)
    block = (rng.choice((1, 16)), rng.choice((1, 8)))
    lengths = (rows * block[0] - rng.randrange(block[0]), columns * block[1])
    mask = BlockMask.from_runs(
        offsets, runs, seq_lengths=lengths, block_size=block, mask_mod=causal
    )
    check_kinds(mask, grid)
    lists = mask.views().index_lists()
    for counts, indices, kind in (
        (lists.kv_num_blocks, lists.kv_indices, PARTIAL),
        (lists.full_kv_num_blocks, lists.full_kv_indices, FULL),
    ):
        assert counts.dtype == indices.dtype == torch.int32
        for place in torch.cartesian_prod(*(torch.arange(n) for n in grid.shape[:3])).tolist():
            b, h, row = place
            listed = indices[b, h, row, : counts[b, h, row]].tolist()
            assert listed == (grid[b, h, row] == kind).nonzero().squeeze(1).tolist()
            assert sorted(indices[b, h, row].tolist()) == list(range(columns))
    shuffled = indices.clone()
    order = torch.randperm(columns)
    wide = BlockMask.from_kv_blocks(
        torch.full_like(counts, columns),
        shuffled[..., order],
        BLOCK_SIZE=block,
        mask_mod=causal,
        seq_lengths=lengths,
    )
    check_kinds(wide, torch.full_like(grid, PARTIAL))
    visited = int((grid != 0).sum())
    assert mask.sparsity() == pytest.approx(100 * (1 - visited / grid.numel()))
    assert torch.equal(mask.to_dense(), (grid != 0).int())


def test_a_column_of_full_blocks_may_continue_as_partial() -> None:
    mask = runs_mask([0, 2, 4], [(0, 2, 1), (2, 3, 2), (0, 1, 2), (1, 3, 1)])
    across = mask.views().transposed()
    assert across.offsets.tolist() == [[[0, 2, 3, 5, 5]]]
    assert across.runs.tolist() == [[0, 1, 1], [1, 2, 2], [0, 2, 1], [0, 1, 2], [1, 2, 1]]
    assert (across.q_length, across.kv_length, across.block_size) == (64, 32, (16, 16))
    assert mask.views().transposed() is across


def test_views_trust_the_offsets_and_not_the_length_of_runs() -> None:
    mask = runs_mask([0, 1, 2], [(0, 1, 2), (0, 2, 1)], capacity=50)
    assert mask.runs.shape == (50, 3)
    mask.runs[2:] = 77  # entries past the used runs mean nothing
    written = written_kinds(mask.offsets, mask.runs, 4)
    views = MaskViews(mask.offsets, mask.runs, 32, 64, (16, 16))
    assert torch.equal(views.kind_rows(0, 2), written)
    assert torch.equal(views.transposed().kind_rows(0, 4).transpose(2, 3), written)
    assert views.index_lists().full_kv_num_blocks.tolist() == [[[0, 2]]]


def test_the_constructor_names_the_ways_to_make_a_mask() -> None:
    for arguments in ((), (int32([[[0, 0]]]), int32([]).view(0, 3))):
        with pytest.raises(BlockMaskError, match=r"BlockMask\.from_runs"):
            BlockMask(*arguments)


@pytest.mark.parametrize("room", [1, 20, 1000])
def test_index_lists_are_made_some_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    grid = random_grid(random.Random(3), 2, 2, 9, 7)
    offsets, runs = grid_runs(grid)
    make = functools.partial(MaskViews, offsets, runs, 9 * 16 - 5, 7 * 16 - 5, (16, 16))
    wanted = [make().index_lists(ragged_is_partial=ragged) for ragged in (False, True)]
    monkeypatch.setattr(to_index_lists, "_BLOCKS", room)
    for ragged in (False, True):
        lists = make().index_lists(ragged_is_partial=ragged)
        for name in IndexLists.__slots__:
            assert torch.equal(getattr(lists, name), getattr(wanted[ragged], name))


def test_index_lists_with_ragged_blocks_as_partial_belong_to_the_caller() -> None:
    runs = int32([(0, 1, FULL), (0, 2, FULL)])
    views = MaskViews(int32([[[0, 1, 2]]]), runs, 30, 60, (16, 16))
    views.index_lists(ragged_is_partial=True).kv_num_blocks.zero_()
    assert views.index_lists(ragged_is_partial=True).kv_num_blocks.tolist() == [[[0, 2]]]


def test_views_are_kept_and_are_where_the_mask_is() -> None:
    mask = create_block_mask(by_batch_and_head, 2, 3, 70, 90, BLOCK_SIZE=16)
    elsewhere = mask.to("meta").views()
    for views, device in ((mask.views(), "cpu"), (elsewhere, "meta")):
        lists = views.index_lists()
        assert lists is views.index_lists() and views.dense() is views.dense()
        tensors = [views.dense(), views.transposed().runs, views.transposed().offsets]
        tensors += [getattr(lists, name) for name in IndexLists.__slots__]
        assert {tensor.device.type for tensor in tensors} == {device}
        assert views.transposed() is views.transposed()
    dense = mask.to_dense()
    dense.zero_()
    assert bool(mask.to_dense().any())


def test_the_hosts_views_are_found_where_they_are_and_never_copied() -> None:
    mask = create_block_mask(by_batch_and_head, 2, 3, 70, 90, BLOCK_SIZE=16)
    views = mask.views()
    assert views.host is views
    copied = views.on(torch.device("meta"))
    assert copied.host is views
    # A mask that was made on a device has no copy on the host until somebody asks for it.
    offsets, runs = (torch.zeros_like(x, device="meta") for x in (views.offsets, views.runs))
    alone = MaskViews(offsets, runs, 70, 90, (16, 16))
    assert alone.host is None
    assert alone.with_copy(views) is alone and alone.host is views


def test_the_transpose_of_a_million_tokens_takes_memory_for_its_runs_only() -> None:
    rows = 2**20 // 128
    line = torch.arange(rows, dtype=torch.int32)
    ends = torch.stack([line * 0, line, line * 0 + FULL, line, line + 1, line * 0 + PARTIAL], 1)
    offsets = torch.cat([line.new_zeros(1), 2 * line + 1])
    views = MaskViews(offsets[None, None], ends.view(-1, 3)[1:], 2**20, 2**20, (128, 128))
    with torch.profiler.profile(profile_memory=True) as profile:
        across = views.transposed()
    allocated = sum(max(event.cpu_memory_usage, 0) for event in profile.events())
    assert allocated < 100 * 2**20 < 2 * rows**2
    # Row r sees columns 0..r, so column c is seen by rows c.., PARTIAL in its first.
    assert across.runs[:4].tolist() == [[0, 1, 2], [1, rows, 1], [1, 2, 2], [2, rows, 1]]
    assert across.runs[-1].tolist() == [rows - 1, rows, 2]


def test_kind_rows_out_of_range_are_refused() -> None:
    views = runs_mask([0, 0, 0], []).views()
    assert views.kind_rows(1, 1).shape == (1, 1, 0, 4)
    with pytest.raises(IndexError, match="1:3 of 2 rows"):
        views.kind_rows(1, 3)


@pytest.mark.parametrize(
    ("offsets", "runs", "message"),
    [
        ([0, 1, 2], [(0, 1, 2), (3, 2, 2)], "run 1 ends at block 2 and begins at 3"),
        ([0, 1, 2], [(1, 1, 2), (0, 2, 2)], "run 0 ends"),
        ([0, 1, 3], [(0, 1, 2), (0, 2, 1), (1, 3, 2)], r"runs 1 and 2 in row \[0, 0, 1\] overlap"),
        ([0, 1, 3], [(0, 1, 2), (2, 3, 1), (0, 1, 2)], r"runs 1 and 2 in row .*not in order"),
        ([0, 1, 2], [(0, 1, 2), (0, 2, 7)], "run 1 has kind 7; FULL is 1, PARTIAL 2"),
        ([0, 1, 2], [(0, 1, 2), (0, 5, 2)], r"run 1 in row \[0, 0, 1\] .*0:5.* 4 columns"),
        ([0, 1, 2], [(-1, 1, 2), (0, 2, 2)], "run 0 .*-1:1"),
        ([0, 2, 0], [(0, 1, 2), (2, 3, 2)], r"position \[0, 0, 2\]: the value is 0, after 2"),
        ([1, 1, 2], [(0, 1, 2), (2, 3, 2)], r"position \[0, 0, 0\]: the value is 1"),
        ([0, 1, 5], [(0, 1, 2), (0, 2, 2)], "offsets must end .* is 5, and runs has 2"),
        ([0, 1, 1], [(0, 1, 2), (0, 2, 2)], "offsets must end .* is 1, and runs has 2"),
        ([0, 1], [(0, 1, 2)], r"offsets must have shape \[B', H', 3\].*got \[1, 1, 2\]"),
    ],
)
def test_wrong_runs_are_named(offsets: Any, runs: Any, message: str) -> None:
    with pytest.raises(BlockMaskError, match=message):
        runs_mask(offsets, runs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": torch.zeros(1, 1, 3)}, r"offsets must have dtype int32, got torch\.float32"),
        ({"runs": torch.zeros(0, 3).long()}, r"runs must have dtype int32, got torch\.int64"),
        ({"runs": [[0, 1, 2]]}, "runs must be a Tensor, got list"),
        ({"runs": int32([[0, 1]])}, r"runs must have shape \[n, 3\].*got \[1, 2\]"),
        ({"runs": int32([[0, 1, 1]]).expand(2**31, 3)}, "2147483648 rows"),
        ({"seq_lengths": (32,)}, "seq_lengths must be a pair"),
        ({"seq_lengths": (32, -1)}, "KV_LEN.*-1"),
        ({"block_size": 0}, "BLOCK_SIZE.*0"),
        ({"capacity": 0, "offsets": int32([[[0, 1, 1]]]), "runs": int32([[0, 1, 1]])}, "capacity"),
        ({"runs": torch.zeros(0, 3, dtype=torch.int32, device="meta")}, "offsets is on cpu"),
        (
            {
                "offsets": torch.zeros(1, 1, 3, dtype=torch.int32, device="meta"),
                "runs": torch.zeros(0, 3, dtype=torch.int32, device="meta"),
            },
            "offsets is on meta, where it has no values",
        ),
    ],
)
def test_wrong_arguments_of_from_runs_are_named(changes: Any, message: str) -> None:
    arguments: dict[str, Any] = {
        "offsets": int32([[[0, 0, 0]]]),
        "runs": int32([]).view(0, 3),
        "seq_lengths": (32, 64),
        "block_size": 16,
        **changes,
    }
    with pytest.raises(BlockMaskError, match=message):
        BlockMask.from_runs(**arguments)


def test_a_partial_run_needs_a_mask_mod() -> None:
    with pytest.raises(BlockMaskError, match=r"row \[0, 0, 1\] has a PARTIAL run.*noop_mask"):
        runs_mask([0, 1, 2], [(0, 1, 1), (0, 2, 2)], mask_mod=None)
    full = runs_mask([0, 1, 2], [(0, 1, 1), (0, 2, 1)], mask_mod=None)
    assert full.mask_mod is None and not full.needs_mask_mod
    partial = runs_mask([0, 1, 2], [(0, 1, 1), (0, 2, 2)], mask_mod=noop_mask)
    with pytest.raises(BlockMaskError, match="mask_mod can't be None.*noop_mask"):
        partial.mask_mod = None
    full.mask_mod = causal
    full.mask_mod = None
    assert full.traced is None


@pytest.mark.parametrize(
    ("counts", "indices", "message"),
    [
        ([1, 2], [[0, 0], [0, 5]], r"block 5 in row \[0, 0, 1\]; there are 2 columns"),
        ([1, 2], [[0, 0], [0, -1]], r"block -1 in row \[0, 0, 1\]"),
        ([1, 2], [[0, 0], [1, 1]], r"block 1 in row \[0, 0, 1\] is listed twice \(a duplicate\)"),
        ([1, 3], [[0, 0], [0, 1]], r"kv_num_blocks is 3 in row \[0, 0, 1\].*0 to 2"),
        ([1, -1], [[0, 0], [0, 1]], r"kv_num_blocks is -1 in row \[0, 0, 1\]"),
        ([1], [[0, 0]], "has 1 rows of blocks, and Q_LEN 32 has 2"),
        ([1, 2, 2], [[0, 0], [0, 1]], r"got \[1, 1, 2, 2\] and \[1, 1, 3\]"),
    ],
)
def test_wrong_index_lists_are_named(counts: Any, indices: Any, message: str) -> None:
    with pytest.raises(BlockMaskError, match=message):
        lists_mask(counts, indices)


def test_wrong_pairs_of_index_lists_are_named() -> None:
    counts, indices = [1, 2], [[0, 0], [0, 1]]
    full_counts = int32([[[0, 1]]])
    with pytest.raises(BlockMaskError, match="full_kv_indices is missing"):
        lists_mask(counts, indices, full_kv_num_blocks=full_counts)
    with pytest.raises(BlockMaskError, match="full_kv_num_blocks is missing"):
        lists_mask(counts, indices, full_kv_indices=int32([[indices]]))
    with pytest.raises(BlockMaskError, match=r"block 0 in row \[0, 0, 1\] is both full and part"):
        lists_mask(
            counts, indices, full_kv_num_blocks=full_counts, full_kv_indices=int32([[indices]])
        )
    with pytest.raises(BlockMaskError, match=r"kv_num_blocks must have dtype int32.*float32"):
        BlockMask.from_kv_blocks(torch.ones(1, 1, 1), torch.ones(1, 1, 1, 1))
    with pytest.raises(BlockMaskError, match="differ in shape"):
        lists_mask(
            counts,
            indices,
            full_kv_num_blocks=full_counts.expand(2, 1, 2),
            full_kv_indices=int32([[indices]]).expand(2, 1, 2, 2),
        )


def test_index_lists_may_be_unsorted_narrow_and_of_lower_rank() -> None:
    sorted_mask = lists_mask([1, 2], [[0, 0], [0, 1]])
    assert lists_mask([1, 2], [[0, 0], [1, 0]]) == sorted_mask
    flat = BlockMask.from_kv_blocks(
        int32([1, 2]), int32([[0, 0], [0, 1]]), BLOCK_SIZE=16, mask_mod=causal
    )
    assert flat == sorted_mask
    narrow = lists_mask([1, 1], [[0], [1]])
    assert written_kinds(narrow.offsets, narrow.runs, 2).tolist() == [[[[2, 0], [0, 2]]]]
    no_mod = lists_mask([1, 2], [[0, 0], [0, 1]], mask_mod=None)
    assert no_mod.mask_mod is noop_mask


def test_masks_made_under_inference_mode_work() -> None:
    with torch.inference_mode():
        mask = create_block_mask(causal, 1, 1, 40, 40, BLOCK_SIZE=16)
    assert mask.views().kind_rows(0, 3).shape == (1, 1, 3, 3)


def test_views_are_derived_once_by_many_threads() -> None:
    mask = create_block_mask(causal, 1, 1, 600, 600, BLOCK_SIZE=16)
    barrier, found = threading.Barrier(8), []

    def work() -> None:
        barrier.wait()
        views = mask.views()
        found.append((views, views.transposed(), views.index_lists()))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tuple(map(id, forms)) for forms in found}) == 1


def test_a_mask_is_printed_with_its_blocks() -> None:
    mask = create_block_mask(by_batch_and_head, 2, 3, 70, 90, BLOCK_SIZE=16)
    text = str(mask)
    assert text.startswith("BlockMask(shape=(2, 3, 70, 90), sparsity=")
    assert "(0, 0)\n" in text and "limit=N" in text and "(1, 2)" not in text
    assert "(1, 2)" in mask.to_string(limit=6)
    assert len(mask.to_string(grid_size=-1, limit=1).split("\n\n")[0].splitlines()) >= 5
    small = mask.to_string(grid_size=(2, 3), limit=1).splitlines()
    assert small[0] == "(0, 0)" and len(small[1]) == 6
    assert "BLOCK_SIZE=(16, 16)" in repr(mask) and "by_batch_and_head" in repr(mask)


@pytest.mark.parametrize(
    "grid_size", ["a", "ab", (3,), (1, 2, 3), 2.5, None, 0, (0, 0), (3, 0), -2, True, (3, "a")]
)
def test_a_drawing_of_no_size_is_refused(grid_size: Any) -> None:
    mask = create_block_mask(by_batch_and_head, 2, 3, 70, 90, BLOCK_SIZE=16)
    with pytest.raises(BlockMaskError, match=r"grid_size must be an int or a pair .* got "):
        mask.to_string(grid_size)


@pytest.mark.parametrize("limit", [-1, 1.5, None, "4", True])
def test_a_drawing_of_no_number_of_heads_is_refused(limit: Any) -> None:
    mask = create_block_mask(by_batch_and_head, 2, 3, 70, 90, BLOCK_SIZE=16)
    with pytest.raises(BlockMaskError, match=r"limit must be (an int|in 0\.\.)"):
        mask.to_string(limit=limit)


def test_a_drawing_takes_a_list_an_unbounded_side_and_no_heads_at_all() -> None:
    mask = create_block_mask(by_batch_and_head, 2, 3, 70, 90, BLOCK_SIZE=16)
    assert mask.to_string([2, 3]) == mask.to_string((2, 3))
    assert len(mask.to_string((-1, 3), limit=1).split("\n\n")[0].splitlines()) >= 5
    assert mask.to_string(limit=0).startswith("...")


def test_every_error_of_a_block_mask_is_an_anyflex_error_and_a_value_error() -> None:
    assert issubclass(BlockMaskError, (AnyflexError, ValueError))


@pytest.mark.parametrize("size", [(32, 32), (48, 16), (8, 200), (20, 70), (512, 512)])
def test_blocks_of_another_size_hold_the_kinds_of_those_that_they_touch(
    size: tuple[int, int],
) -> None:
    mask = create_block_mask(
        lambda b, h, q, k: (q + 9 * h >= k) & (k // 40 != 1), 1, 3, 150, 170, BLOCK_SIZE=16
    )
    views = mask.views()
    kinds, made = views.dense(), views.in_blocks(size)
    assert made is views.in_blocks(size) and views.in_blocks((16, 16)) is views
    assert (made.block_size, made.q_length, made.kv_length) == (size, 150, 170)
    found = made.dense()
    assert found.shape[2:] == (-(-150 // size[0]), -(-170 // size[1]))
    for row in range(found.shape[2]):
        for column in range(found.shape[3]):
            rows = slice(row * size[0] // 16, -(-min((row + 1) * size[0], 150) // 16))
            columns = slice(column * size[1] // 16, -(-min((column + 1) * size[1], 170) // 16))
            touched = kinds[:, :, rows, columns].flatten(2)
            wanted = torch.where((touched == FULL).all(2), FULL, PARTIAL)
            wanted = wanted.masked_fill((touched == 0).all(2), 0)
            assert torch.equal(found[:, :, row, column].long(), wanted)
