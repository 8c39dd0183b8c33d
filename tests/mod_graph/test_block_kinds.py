"""Kinds of blocks by lengths on a device: what they say is true, and nothing is copied back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from anyflex.mod_graph.block_graph import BlockGraph, block_graph
from anyflex.mod_graph.block_kinds import BlockGrid, block_kinds
from anyflex.mod_graph.graph import parse_graph
from anyflex.mod_graph.range_tables import RangeTable
from anyflex.mod_graph.simplify import simplify
from anyflex.tracing.trace import TracedMod, trace_mod

__all__: list[str] = []

GRID = BlockGrid(heads=2, q_tiles=6, kv_blocks=8, q_block=8, kv_block=16)
SLOTS = [3, 0, 2, 1, 4]
Q_LENGTHS = [41, 0, 1, 5, 48]
KV_LENGTHS = [60, 30, 128, 0, 40]
STARTS = [kv - q for q, kv in zip(Q_LENGTHS, KV_LENGTHS, strict=True)]

PREFIXES = torch.arange(5) * 9
WIDTHS = torch.tensor([6, 70])
DOCUMENTS = torch.tensor([[(i + 5 * b) // 24 for i in range(160)] for b in range(5)])
MASKS: dict[str, Callable[..., Any]] = {
    "everything": lambda b, h, q, k: q > -100,
    "causal": lambda b, h, q, k: q >= k,
    "window of a head": lambda b, h, q, k: (q >= k) & (q - k < WIDTHS[h]),
    "prefix of a slot": lambda b, h, q, k: (q >= k) | (k < PREFIXES[b]),
    "chunks": lambda b, h, q, k: (q // 16 == k // 16) & (q >= k),
    "documents of a slot": lambda b, h, q, k: (q >= k) & (DOCUMENTS[b, q] == DOCUMENTS[b, k]),
    "keys alone": lambda b, h, q, k: k % 32 < 16,
}


def given(name: str) -> tuple[BlockGraph, TracedMod]:
    traced = trace_mod(MASKS[name], "mask")
    return block_graph(simplify(parse_graph(traced.text))), traced


def kinds_of(name: str) -> Tensor:
    blocks, traced = given(name)
    return block_kinds(
        blocks,
        GRID,
        slots=torch.tensor(SLOTS, dtype=torch.int32),
        q_starts=torch.tensor(STARTS, dtype=torch.int32),
        q_lengths=torch.tensor(Q_LENGTHS, dtype=torch.int32),
        kv_lengths=torch.tensor(KV_LENGTHS, dtype=torch.int32),
        captured=blocks.tensors(traced.captured, GRID.q_block, GRID.kv_block),
        ints=traced.ints,
        floats=traced.floats,
    )


def true_kind(name: str, sequence: int, head: int, tile: int, block: int) -> int:
    first, count = tile * GRID.q_block, Q_LENGTHS[sequence]
    rows = range(first, min(first + GRID.q_block, count))
    first, count = block * GRID.kv_block, KV_LENGTHS[sequence]
    columns = range(first, min(first + GRID.kv_block, count))
    slot, start = SLOTS[sequence], STARTS[sequence]
    live = [bool(MASKS[name](slot, head, start + row, k)) for row in rows for k in columns]
    return 0 if not any(live) else 1 if all(live) else 2


@pytest.mark.parametrize("name", MASKS)
def test_blocks_of_sequences_have_their_kinds(name: str) -> None:
    kinds = kinds_of(name)
    shape = (len(SLOTS), GRID.heads, GRID.q_tiles, GRID.kv_blocks)
    assert kinds.shape == shape and kinds.dtype is torch.int32
    open_ = 0
    for place in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        kind, true = int(kinds[tuple(place)]), true_kind(name, *place)
        assert kind in (true, 2)
        open_ += kind != true
    exact = name not in ("prefix of a slot", "chunks", "documents of a slot")
    assert open_ == 0 if exact else open_ < kinds.numel() // 20


def test_a_mask_that_does_not_read_the_head_is_evaluated_once_for_all() -> None:
    assert kinds_of("causal").stride(1) == 0
    assert kinds_of("window of a head").stride(1) != 0


@pytest.mark.parametrize("name", MASKS)
def test_nothing_is_copied_to_the_host(name: str) -> None:
    # A tensor of the meta device has no value that could be read.
    blocks, traced = given(name)
    lengths = torch.zeros(3, dtype=torch.int32, device="meta")
    captured = [table.to("meta") for table in traced.captured]
    kinds = block_kinds(
        blocks,
        GRID,
        slots=lengths,
        q_starts=lengths,
        q_lengths=lengths,
        kv_lengths=lengths,
        captured=blocks.tensors(captured, GRID.q_block, GRID.kv_block),
        ints=traced.ints,
        floats=traced.floats,
    )
    assert kinds.device.type == "meta" and kinds.shape == (3, 2, 6, 8)


def test_no_sequences_have_no_blocks() -> None:
    blocks, traced = given("documents of a slot")
    none = torch.zeros(0, dtype=torch.int32)
    kinds = block_kinds(
        blocks,
        GRID,
        slots=none,
        q_starts=none,
        q_lengths=none,
        kv_lengths=none,
        captured=blocks.tensors(traced.captured, GRID.q_block, GRID.kv_block),
        ints=traced.ints,
        floats=traced.floats,
    )
    assert kinds.shape == (0, 2, 6, 8)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 24])
@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_a_range_table_holds_the_extremes_of_each_stretch(size: int, dimension: int) -> None:
    shape = [3, 2, 4]
    shape[dimension] = size
    for dtype in (torch.int8, torch.int64, torch.bool, torch.bfloat16):
        table = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        made = RangeTable(0, dimension, "kv_block").made([table], 4, 8)
        stretches = table.split(8, dimension)
        for side, extreme in ((0, torch.amin), (1, torch.amax)):
            wanted = [extreme(stretch, dimension) for stretch in stretches]
            assert torch.equal(made[side], torch.stack(wanted, dimension))
