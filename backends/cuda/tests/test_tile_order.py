"""The order in which Hopper's forward takes the tiles of a head: the longest rows first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from recording import CORES, OnHopper, drawn, launches_on, recording

import anyflex
from anyflex.plugin import isolated, register
from anyflex_cuda import tile_order


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


class Streams:
    """A GPU's streams, of which one is current, and its events."""

    def __init__(self) -> None:
        self.current, self.capturing, self.done = 7, False, False
        self.waited: list[int] = []
        self.recorded: list[int] = []

    def query(self) -> bool:
        assert not self.capturing, "an event is asked for within a capture"
        return self.done

    def wait(self, stream: int) -> None:
        assert not self.capturing
        self.waited.append(stream)

    def handle(self) -> Any:
        current = self.current
        return mock.Mock(number=current, wait_event=lambda event: self.wait(current))


@pytest.fixture
def streams() -> Iterator[Streams]:
    made = Streams()
    event = mock.Mock(query=made.query)
    driver = mock.Mock()
    driver.active.get_current_stream = lambda device: made.current
    with (
        mock.patch.object(tile_order, "driver", driver),
        mock.patch.object(torch.cuda, "Event", lambda: event),
        mock.patch.object(torch.cuda, "current_stream", lambda device: made.handle()),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: made.capturing),
    ):
        yield made


def of_gpu(streams: Streams) -> Any:
    """A call whose mask is said to be on a GPU."""
    mask = anyflex.create_block_mask(causal, None, None, 512, 512)

    class OnGPU(torch.Tensor):
        is_cuda = True

        def record_stream(self, stream: Any) -> None:
            streams.recorded.append(stream.number)

    views = mask.views()
    offsets, runs = (tensor.as_subclass(OnGPU) for tensor in (views.offsets, views.runs))
    moved = mock.Mock(
        offsets=offsets, runs=runs, once=views.once, block_size=views.block_size, mask=mask
    )
    return mock.Mock(mask=moved)


def test_another_stream_waits_until_the_order_is_there(streams: Streams) -> None:
    call = of_gpu(streams)
    order = tile_order.tile_order(call, 128, 4)
    assert order.tiles is not None
    # Behind what made it nobody waits.
    assert tile_order.tile_order(call, 128, 4) is order
    assert (streams.waited, streams.recorded) == ([], [])
    streams.current = 8
    assert tile_order.tile_order(call, 128, 4) is order
    assert (streams.waited, streams.recorded) == ([8], [8])
    streams.done = True
    assert tile_order.tile_order(call, 128, 4) is order
    assert (streams.waited, streams.recorded) == ([8], [8, 8])
    streams.current = 7
    assert tile_order.tile_order(call, 128, 4) is order
    assert (streams.waited, streams.recorded) == ([8], [8, 8])


def test_a_captured_call_has_an_order_that_was_there_before_and_makes_none(
    streams: Streams,
) -> None:
    call = of_gpu(streams)
    streams.capturing = True
    assert tile_order.tile_order(call, 128, 4) is tile_order.NO_ORDER
    streams.capturing = False
    order = tile_order.tile_order(call, 128, 4)
    for streams.current in (7, 8):
        streams.capturing = True
        assert tile_order.tile_order(call, 128, 4) is tile_order.NO_ORDER
        streams.capturing = False
    streams.done, streams.current = True, 7
    assert tile_order.tile_order(call, 128, 4) is order
    streams.capturing = True
    for streams.current in (7, 8):
        assert tile_order.tile_order(call, 128, 4) is order
    assert streams.waited == []


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
