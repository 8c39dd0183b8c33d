"""PagedKVCache on a device: the same rows as on a CPU, eager and from a captured graph."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from anyflex.paging.cache import PagedKVCache
from anyflex.paging.storage import STORAGES

__all__: list[str] = []

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device on this machine"
)

LAYERS, ROWS = 2, 24


def made(storage: str, device: str) -> PagedKVCache:
    cache = PagedKVCache(LAYERS, 40, 4, 2, 16, slots=6, width=20, storage=storage, device=device)
    for pool in cache._pools:
        pool.zero_()
    return cache


def append_all(cache: PagedKVCache, rows: Tensor) -> Tensor:
    """Append to each layer in a pass of its own, and return the positions."""
    step = cache.begin()
    for layer in range(LAYERS):
        cache.append(step, layer, rows + layer, rows * 2)
    return cache.positions(step, len(rows))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_replay_appends_what_the_last_step_asked_for(storage: str) -> None:
    on_cpu, on_device = made(storage, "cpu"), made(storage, "cuda")
    caches = on_cpu, on_device
    rows = torch.zeros(ROWS, 2, 16, device="cuda")
    for cache in caches:
        assert cache.step([(cache.open(), 1)]) is not None
        cache.open()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        append_all(on_device, rows)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        positions = append_all(on_device, rows)
    append_all(on_cpu, rows.cpu())
    rng = random.Random(3)
    for _ in range(30):
        wanted = [(slot, rng.choice((0, 1, 1, 2, 9))) for slot in (0, 1)]
        if rng.random() < 0.2:
            for cache in caches:
                cache.trim(0, 0)
                cache.trim(1, cache.length(1) // 2)
                cache.close(cache.open(1))
        steps = [cache.step(wanted) for cache in caches]
        if steps[0] is None:
            assert steps[1] is None
            continue
        rows.copy_(torch.randn(ROWS, 2, 16))
        graph.replay()
        expected = append_all(on_cpu, rows.cpu())
        assert torch.equal(positions.cpu(), expected)
        assert torch.equal(on_device.page_table.cpu(), on_cpu.page_table)
        for found, wanted_pool in zip(on_device._pools, on_cpu._pools, strict=True):
            # The device may round a quotient elsewhere: one step of a stored number.
            difference = (found.cpu().float() - wanted_pool.float()).abs().max()
            assert difference <= (1e-6 if found.dtype.is_floating_point else 1)


def test_steps_that_follow_each_other_at_once_overwrite_no_copy_under_way() -> None:
    """Pinned buffers take turns: a step's numbers stay until their copy has ended."""
    cache = made("plain", "cuda")
    slots = [cache.open() for _ in range(6)]
    seen = []
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy * 1e-3  # the copies have to wait for it
        step = cache.step([(slot, 1) for slot in slots])
        assert step is not None
        seen.append(step.packed.kv_lengths.clone())
    assert [lengths.tolist() for lengths in seen] == [[n + 1] * 6 for n in range(20)]
