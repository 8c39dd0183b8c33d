"""The order in which Hopper's forward takes the tiles of a head: the longest rows first."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from recording import CORES, OnHopper, drawn, launches_on, recording

import anyflex
from anyflex.plugin import isolated, register


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Of 700 tokens, and of 300 more for each batch entry."""
    return q // (700 + 300 * b) == k // (700 + 300 * b)


def by_head(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + k < 1500 + 600 * h) & (q >= k // 2)


def launched(mask: Any, batch: int, heads: int, length: int, dim: int = 128) -> dict[str, Any]:
    ((_, _, values),), _ = launches_on(
        OnHopper, *drawn(*[(batch, heads, length, dim)] * 3), block_mask=mask
    )
    return values


@pytest.mark.parametrize(
    ("mask_mod", "heads", "block", "length"),
    [
        (causal, None, 128, 4096), (documents, None, 128, 4096), (by_head, 4, 128, 4096),
        # Of blocks of 384 rows the last has one tile.
        (documents, None, 384, 4096 - 200), (by_head, 4, 256, 4096),
    ],
)  # fmt: skip
def test_the_longest_rows_come_first_and_of_equal_ones_the_last(
    mask_mod: Any, heads: int | None, block: int, length: int
) -> None:
    mask = anyflex.create_block_mask(mask_mod, 2, heads, length, length, BLOCK_SIZE=(block, 128))
    values = launched(mask, 2, heads or 4, length)
    assert values["ordered"] == 1
    order, tiles = values["order"], values["tiles"]
    assert order.dtype is torch.int32 and order.shape[2] == tiles == -(-length // 128)
    blocks = mask.to_dense().sum(-1)
    for b in range(2):
        for h in range(heads or 4):
            row = blocks[min(b, len(blocks) - 1), min(h, blocks.shape[1] - 1)].tolist()
            costs = [row[tile * 128 // block] for tile in range(tiles)]
            wanted = sorted(range(tiles), key=lambda tile: (-costs[tile], -tile))
            at = b * values["order_strides"][0] + h * values["order_strides"][1]
            assert order.flatten()[at : at + tiles].tolist() == wanted


def test_it_is_made_once_a_mask_and_where_programs_take_several_tiles() -> None:
    mask = anyflex.create_block_mask(causal, None, None, 512, 512)
    alone = launched(mask, 1, CORES // 4, 512)
    assert alone["ordered"] == 0 and alone["order"] is alone["query"]
    one, other = (launched(mask, 1, CORES // 4 + 1, 512)["order"] for _ in range(2))
    assert one is other and one.tolist() == [[[3, 2, 1, 0]]]
    # A shorter query has fewer tiles, of other rows.
    wide = anyflex.create_block_mask(causal, None, None, 512, 512, BLOCK_SIZE=192)
    assert launched(wide, 1, CORES, 512, dim=64)["order"].tolist() == [[[2, 1, 0]]]


def test_without_a_mask_nothing_is_ordered() -> None:
    ((program, _, _),), _ = launches_on(OnHopper, *drawn(*[(2, 16, 2048, 64)] * 3))
    assert program.constants["order"] is None


def test_a_graph_that_captures_the_first_call_of_a_mask_has_none_and_keeps_none() -> None:
    mask = anyflex.create_block_mask(causal, None, None, 512, 512)

    class OfGPU(torch.Tensor):
        is_cuda = True

    from anyflex_cuda.tile_order import NO_ORDER, tile_order

    views = mask.views()
    on_gpu = mock.Mock(offsets=views.offsets.as_subclass(OfGPU), runs=views.runs)
    on_gpu.once, on_gpu.block_size = views.once, views.block_size
    call: Any = mock.Mock(mask=on_gpu)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        assert tile_order(call, 128, 4) is NO_ORDER
    assert launched(mask, 1, CORES, 512)["ordered"] == 1
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        assert tile_order(call, 128, 4).tiles is not None  # made before, so that it stays


def test_threads_that_meet_a_mask_at_once_get_one_order_each() -> None:
    mask = anyflex.create_block_mask(documents, 2, None, 4096, 4096)
    q, k, v = drawn(*[(2, 8, 4096, 128)] * 3)
    gate = threading.Barrier(4)

    def call() -> None:
        gate.wait()
        anyflex.flex_attention(q, k, v, block_mask=mask, backend="cuda")

    with isolated():
        register("cuda", OnHopper)
        with recording() as noted:
            threads = [threading.Thread(target=call) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    orders = [values["order"] for _, _, values in noted]
    assert len(orders) == 4
    assert all(torch.equal(orders[0], order) for order in orders)  # type: ignore[arg-type]
