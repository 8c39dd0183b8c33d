"""BlockMask: its checks, views, copies and slices."""

from __future__ import annotations

import copy
import functools
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anyflex.block_mask.block_mask import BlockMask
from anyflex.block_mask.build import create_block_mask
from anyflex.block_mask.combine import and_masks, noop_mask
from anyflex.block_mask.mask_function import RebuiltMaskMod, sliced_mask_mod
from anyflex.block_mask.saved_form import FORMAT
from anyflex.block_mask.views import FULL, PARTIAL, MaskViews
from anyflex.errors import AnyflexError, BlockMaskError
from tests.core.dense_blocks import check_kinds, dense_mask, written_kinds


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def by_batch_and_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q + 20 * b >= k + 30 * h


def untraceable(b: Any, h: Any, q: Any, k: Any) -> Any:
    return by_batch_and_head(b, h, q, k) & (torch.special.bessel_j0((q - k).float()) < 2)


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def runs_mask(offsets: list[int], runs: list[tuple[int, int, int]], **more: Any) -> BlockMask:
    """A mask of 2 x 4 blocks of 16."""
    more.setdefault("mask_mod", causal)
    return BlockMask.from_runs(
        int32([[offsets]]), int32(runs).view(-1, 3), seq_lengths=(32, 64), block_size=16, **more
    )


def lists_mask(counts: Any, indices: Any, **more: Any) -> BlockMask:
    """A mask of 2 x 2 blocks of 16 from torch's index lists."""
    more = {"mask_mod": causal, "seq_lengths": (32, 32), **more}
    return BlockMask.from_kv_blocks(int32([[counts]]), int32([[indices]]), BLOCK_SIZE=16, **more)


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
    mask.runs[2:] = 77  # what lies past the used runs means nothing
    written = written_kinds(mask.offsets, mask.runs, 4)
    views = MaskViews(mask.offsets, mask.runs, 32, 64, (16, 16))
    assert torch.equal(views.kind_rows(0, 2), written)
    assert torch.equal(views.transposed().kind_rows(0, 4).transpose(2, 3), written)
    assert views.index_lists().full_kv_num_blocks.tolist() == [[[0, 2]]]


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


def test_a_mask_changed_in_place_is_refused() -> None:
    table = torch.ones(32, dtype=torch.bool)
    mask = create_block_mask(lambda b, h, q, k: table[k] & (q >= k), 1, 1, 32, 32, BLOCK_SIZE=16)
    mask.views()
    table[3] = False
    with pytest.raises(BlockMaskError, match="captured tensor.* was changed in place"):
        mask.views()
    mask = create_block_mask(causal, 1, 1, 32, 32)
    mask.runs.zero_()
    with pytest.raises(BlockMaskError, match="^runs .*changed in place"):
        mask.views()
    mask = create_block_mask(causal, 1, 1, 32, 32)
    mask.offsets.resize_(1, 1, 1)
    with pytest.raises(BlockMaskError, match=r"offsets .*had shape \[1, 1, 2\] and has \[1, 1, 1"):
        mask.views()
    mask = create_block_mask(causal, 1, 1, 32, 32)
    mask.offsets = mask.offsets.clone()
    with pytest.raises(BlockMaskError, match="assigned"):
        mask.views()


def test_a_structure_that_the_user_gave_lets_captured_values_change_but_not_sizes() -> None:
    lengths = torch.tensor([20])
    mask = runs_mask([0, 1, 2], [(0, 2, 2), (0, 2, 2)], mask_mod=lambda b, h, q, k: k < lengths[b])
    mask.views()
    lengths.add_(1)
    mask.views()
    lengths.resize_(0)
    with pytest.raises(BlockMaskError, match=r"captured .*had shape \[1\] and has \[0\]"):
        mask.views()


def test_masks_made_under_inference_mode_work() -> None:
    with torch.inference_mode():
        mask = create_block_mask(causal, 1, 1, 40, 40, BLOCK_SIZE=16)
    assert mask.views().kind_rows(0, 3).shape == (1, 1, 3, 3)


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
    assert state["format"] == FORMAT == 1
    for format_ in (0, 2, None):
        with pytest.raises(BlockMaskError, match=rf"format {format_}, .* reads format 1"):
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
        ((0, torch.tensor([0.5])), "head index must be a vector of ints.*float32"),
        ((0, 0, 0, 0), "up to 3 indices.*got 4"),
        ((torch.tensor([0]), torch.tensor([0])), "at most one tensor index"),
        ("b", "batch index must be an int, slice or vector, got 'b'"),
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
        create_block_mask(causal, 4, 4, 8, 8)[0, 2]


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


def test_every_error_of_a_block_mask_is_an_anyflex_error_and_a_value_error() -> None:
    assert issubclass(BlockMaskError, (AnyflexError, ValueError))
