"""Structure of packed calls made on a device: static shapes, nothing read, the same blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.mask_structure.device_views import MaskViews
from anyflex.mask_structure.runs import pack, runs_of_grid
from anyflex.mask_structure.static_runs import runs_of_kinds
from anyflex.packed.own_layout import _rows, _views
from anyflex.packed.row_blocks import row_blocks, static_offsets, static_row_blocks
from anyflex.tracing.trace import trace_mod

__all__: list[str] = []

SPANS = torch.tensor([3, 300, 0, 129, 7, 1])


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < SPANS[b] + 100 * h)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("fill", ["random", "none", "full", "alternating"])
@pytest.mark.parametrize("shape", [(2, 5, 7), (1, 3, 1), (3, 0, 4), (1, 2, 64)])
def test_runs_are_those_that_the_host_packs(shape: tuple[int, int, int], fill: str) -> None:
    kinds = {
        "random": torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(0)),
        "none": torch.zeros(shape, dtype=torch.int64),
        "full": torch.ones(shape, dtype=torch.int64),
        "alternating": torch.arange(shape[2]).remainder(2).add(1).expand(shape),
    }[fill].to(torch.int8)
    wanted = pack(runs_of_grid(kinds.flatten(0, 1), 0), 1, *shape)
    offsets, runs = runs_of_kinds(kinds)
    assert torch.equal(offsets, wanted[0]) and offsets.dtype is torch.int32
    used = int(offsets[0, -1, -1])
    assert torch.equal(runs[:used], wanted[1][:used])
    assert runs.shape == (kinds.numel() + 2, 3)


@pytest.mark.parametrize(
    ("lengths", "spare"),
    [([130, 0, 1, 256], 0), ([130, 0, 1, 256], 140), ([0, 0], 5), ([0], 0), ([1] * 300, 84)],
)
def test_rows_of_blocks_are_found_on_the_device(lengths: list[int], spare: int) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packed = anyflex.Packed(offsets)
    rows = sum(lengths) + spare
    wanted = [(i, tile) for i, n in enumerate([*lengths, spare]) for tile in range(-(-n // 128))]
    assert row_blocks(packed, offsets, rows).tolist() == [list(pair) for pair in wanted]
    static = static_row_blocks(packed, offsets, rows)
    assert static.dtype is torch.int32 and static.is_contiguous()
    there = [pair for pair in static.tolist() if has_rows(*pair, [*lengths, spare])]
    assert there == [list(pair) for pair in wanted]
    assert len(static) <= len(lengths) + 1 + (rows + 127) // 128


def has_rows(sequence: int, number: int, lengths: list[int]) -> bool:
    return sequence >= 0 and number * 128 < lengths[sequence]


@pytest.mark.parametrize("most", [60, 128, 300])
@pytest.mark.parametrize("spare", [0, 3, 400])
def test_rows_of_blocks_need_no_search_where_each_sequence_has_one(most: int, spare: int) -> None:
    lengths = [most, 0, 1, most // 2, 0, most]
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    rows = sum(lengths) + spare
    static = static_row_blocks(anyflex.Packed(offsets), offsets, rows).tolist()
    wanted = [[i, tile] for i, n in enumerate([*lengths, spare]) for tile in range(-(-n // 128))]
    assert [pair for pair in static if has_rows(*pair, [*lengths, spare])] == wanted
    # Lists of steps, and ranges of heads, go on from sequence to sequence.
    assert [pair for pair in static if pair[0] >= 0] == sorted(p for p in static if p[0] >= 0)


@pytest.mark.parametrize(
    "broken",
    [(0, 1000, 999), (0, 101, 202), (1, 50, 100), (0, -5, 20), (0, 2**31 - 1, -1), (7, 7, 7)],
)
def test_a_batch_whose_numbers_break_its_bounds_has_padding_rows_alone(
    broken: tuple[int, ...],
) -> None:
    packed = anyflex.Packed(int32(0, 100, 200), max_q=100)
    assert static_offsets(packed).tolist() == [0, 100, 200]
    packed.q_offsets.copy_(int32(0, 0, 37))
    assert static_offsets(packed).tolist() == [0, 0, 37]
    packed.q_offsets.copy_(int32(*broken))
    offsets = static_offsets(packed)
    assert offsets.tolist() == [0, 0, 0] and offsets.dtype is torch.int32
    table = static_row_blocks(packed, offsets, 300).tolist()
    assert [pair for pair in table if has_rows(*pair, [0, 0, 300])] == [[2, 0], [2, 1], [2, 2]]


def batch(device: str) -> anyflex.Packed:
    return anyflex.Packed(
        int32(0, 130, 130, 431).to(device),
        int32(300, 5, 400).to(device),
        page_table=torch.zeros(6, 16, dtype=torch.int32, device=device),
        slots=int32(1, 4, 3).to(device),
        max_q=301,
        max_kv=400,
    )


def views_on(device: str) -> MaskViews:
    packed = batch(device)
    mask = trace_mod(window, "mask")
    mask.captured[:] = [each.to(device) for each in mask.captured]
    return _views(_rows(packed, 440), mask, 2)


def test_nothing_is_copied_to_the_host() -> None:
    # A tensor of the meta device has no value that could be read.
    views = views_on("meta")
    assert views.device.type == "meta" and views.block_size == (128, 128)
    assert views.shape == (1, 2, 1 + (440 + 127 * 4) // 128)


def test_blocks_are_visited_where_the_mask_is_live() -> None:
    views = views_on("cpu")
    packed = batch("cpu")
    kinds = views.kind_rows(0, views.q_blocks)[0]
    for row, (sequence, tile) in enumerate(row_blocks(packed, packed.q_offsets, 440).tolist()):
        if sequence == 3:
            assert not kinds[:, row].any()
            continue
        length = int(packed.q_offsets.diff()[sequence])
        places = torch.arange(tile * 128, min(length, tile * 128 + 128))
        q_idx = (int(packed.q_starts[sequence]) + places).view(1, -1, 1)
        keys = torch.arange(int(packed.kv_lengths[sequence]))
        live = window(int(packed.slots[sequence]), torch.arange(2).view(2, 1, 1), q_idx, keys)
        for column, part in enumerate(live.split(128, -1)):
            for head in range(2):
                true = 0 if not part[head].any() else 1 if part[head].all() else 2
                assert kinds[head, row, column] in (true, 2)
                assert true or not kinds[head, row, column]
