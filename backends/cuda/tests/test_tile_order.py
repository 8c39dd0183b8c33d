"""Order in which forward takes a head's tiles: against a plain count of the blocks that rows see,
and which calls have one."""

from __future__ import annotations

import random
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from recording import CORES, OnBlackwell, OnHopper, drawn, launches_on

import anyflex
from anyflex.plugin import MaskViews
from anyflex_cuda import tile_order as tested
from anyflex_cuda.backend import VARIABLE
from anyflex_cuda.tile_order import tile_order

__all__: list[str] = []


def drawn_mask(pick: random.Random, q_block: int) -> tuple[MaskViews, list[list[int]]]:
    """Return (a mask, the number of blocks that each row of each head visits)."""
    batch, heads, rows = pick.choice((1, 2)), pick.choice((1, 3)), pick.randint(1, 20)
    length = rows * q_block - pick.choice((0, 1, q_block // 2, q_block - 1))
    edges: list[list[int]] = []
    runs: list[tuple[int, int, int]] = []
    counts: list[list[int]] = []
    for _ in range(batch * heads):
        edges.append([len(runs)])
        counts.append([0] * rows)
        for row in range(rows):
            at = 0
            while pick.random() < 0.6:
                first = at + pick.randint(0, 2)
                at = first + pick.randint(1, 4)
                runs.append((first, at, pick.choice((1, 2))))
                counts[-1][row] += at - first
            edges[-1].append(len(runs))
    # Entries past the last run are arbitrary.
    runs += [(7, -(10**9), 77)] * pick.choice((2, 9))
    offsets = torch.tensor(edges, dtype=torch.int32).view(batch, heads, rows + 1)
    if pick.random() < 0.3:
        offsets = offsets.transpose(0, 1).contiguous().transpose(0, 1)
    given = offsets, torch.tensor(runs, dtype=torch.int32)
    return MaskViews(*given, length, 4096, (q_block, 128)), counts


def wanted(counts: list[int], length: int, q_block: int, block_m: int) -> list[int]:
    """Return a head's tiles, the shortest first, and equally long ones in their order."""

    def blocks(tile: int) -> int:
        ends = tile * block_m, min(tile * block_m + block_m, length) - 1
        return sum(counts[row // q_block] for row in ends)

    return sorted(range(-(-length // block_m)), key=blocks)


@pytest.mark.parametrize(
    ("q_block", "block_m"),
    [(128, 64), (128, 128), (256, 64), (256, 128), (192, 192), (384, 192), (384, 128),
     # Tiles of Blackwell, whose halves may belong to two rows of blocks.
     (128, 256), (384, 256), (512, 256)],
)  # fmt: skip
def test_tiles_are_sorted_by_the_blocks_that_their_rows_visit(q_block: int, block_m: int) -> None:
    pick = random.Random(q_block + block_m)
    ordered = 0
    for _ in range(40):
        views, counts = drawn_mask(pick, q_block)
        found = tile_order(views, block_m)
        orders = [wanted(of_head, views.q_length, q_block, block_m) for of_head in counts]
        if found is None:
            assert all(order == sorted(order) for order in orders)
            continue
        ordered += 1
        assert found.tiles.dtype is torch.int32 and found.tiles.is_contiguous()
        batch, heads, _ = views.offsets.shape
        flat, (of_batch, of_head) = found.tiles.flatten().tolist(), found.strides
        assert (of_batch == 0) == (batch == 1) and (of_head == 0) == (heads == 1)
        for number, order in enumerate(orders):
            at = number // heads * of_batch + number % heads * of_head
            assert flat[at : at + len(order)] == order
    assert ordered > 10


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 300)


def prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) | (k < 400)


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Mask of documents of 170 tokens, like other tests' of this folder. Another number would
    become a run-time argument, which the kernel in Python doesn't take."""
    return (q // 170 == k // 170) & (q >= k)


def mask_of(mask_mod: Any, length: int = 2048, block: int = 128) -> anyflex.BlockMask:
    return anyflex.create_block_mask(mask_mod, None, None, length, length, BLOCK_SIZE=block)


@pytest.mark.parametrize("mask_mod", [causal, window, prefix])
def test_where_the_last_rows_are_the_longest_there_is_no_order(mask_mod: Any) -> None:
    views = mask_of(mask_mod).views()
    assert [tile_order(views, rows) for rows in (64, 128, 256)] == [None] * 3


def test_a_mask_that_the_host_does_not_know_has_none() -> None:
    host = mask_of(documents).views()
    offsets, runs = (tensor.to("meta") for tensor in (host.offsets, host.runs))
    elsewhere = MaskViews(offsets, runs, 2048, 2048, (128, 128))
    assert tile_order(elsewhere, 128) is None
    # Once the host has a copy, there is an order, on the mask's device.
    found = tile_order(elsewhere.with_copy(host), 128)
    assert found is not None and found.tiles.device.type == "meta"


class OfCuda:
    """Views of a mask that claim to be on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, views: MaskViews) -> None:
        self.host, self.once = views, views.once


def test_a_graph_that_captures_the_first_call_has_none_and_keeps_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = mask_of(documents).views()
    views = cast(MaskViews, OfCuda(host))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tile_order(views, 128) is None
    # A result of None is found out and cached too.
    assert tile_order(cast(MaskViews, OfCuda(mask_of(causal).views())), 128) is None
    found = tile_order(host, 128)
    assert found is not None
    assert tile_order(views, 128) is found  # made before, so there is nothing to copy


def launched(
    mask: anyflex.BlockMask | None, heads: int, length: int = 2048, dim: int = 128,
    backend: Any = OnHopper,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    ((program, _, values),), _ = launches_on(
        backend, *drawn(*[(1, heads, length, dim)] * 3), block_mask=mask
    )
    return program, values


def test_a_call_has_the_order_of_its_mask_and_it_is_counted_once() -> None:
    mask = mask_of(documents)
    with mock.patch.object(tested, "_costs", wraps=tested._costs) as counted:
        (_, one), (_, other) = (launched(mask, 16) for _ in range(2))
    assert counted.call_count == 1
    found = tile_order(mask.views(), 128)
    assert found is not None
    for values in (one, other):
        assert values["ordered"] == 1 and values["tile_order"] is found.tiles
        assert values["order_strides"] == (0, 0) and values["tiles"] == found.tiles.shape[2]


def test_a_causal_call_has_none_and_is_counted_once() -> None:
    mask = mask_of(causal)
    with mock.patch.object(tested, "_costs", wraps=tested._costs) as counted:
        programs, values = zip(*(launched(mask, 16) for _ in range(2)), strict=True)
    assert counted.call_count == 1
    assert [given["ordered"] for given in values] == [0, 0]
    assert values[0]["tile_order"] is values[0]["offsets"]
    # One kernel for both kinds.
    assert programs[0].types["ordered"] == "i32"


def test_where_all_tiles_run_at_once_nothing_is_counted() -> None:
    mask = mask_of(documents, 512)
    with mock.patch.object(tested, "_costs", wraps=tested._costs) as counted:
        _, values = launched(mask, CORES // 8, 512)
        assert values["ordered"] == 0 and counted.call_count == 0
        # Tiles have 128 rows, and each still has a multiprocessor.
        _, values = launched(mask, CORES // 4, 512)
        assert values["ordered"] == 0 and counted.call_count == 0


def test_without_a_mask_there_is_no_argument_for_it() -> None:
    program, values = launched(None, 16)
    for name in ("tile_order", "order_strides", "ordered"):
        assert name not in program.types and program.constants[name] is None
        assert name not in values


def test_blackwells_has_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    mask = mask_of(documents)
    _, values = launched(mask, 32, backend=OnBlackwell)
    found = tile_order(mask.views(), 256)
    assert found is not None and values["tiles"] == 8
    assert values["ordered"] == 1 and values["tile_order"] is found.tiles
