"""PagedKVCache on a device: the same rows as on a CPU, eager and from a captured graph."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.paging.cache import PagedKVCache
from anyflex.paging.storage import STORAGES, bytes_of

__all__: list[str] = []

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device on this machine"
)

LAYERS, ROWS = 2, 24


def owned(cache: PagedKVCache) -> list[Tensor]:
    """Return what the pages of sequences hold."""
    pools = cache.key, cache.value, cache.key_scale, cache.value_scale
    return [bytes_of(pool) for pool in pools if pool is not None]


def made(storage: str, device: str) -> PagedKVCache:
    cache = PagedKVCache(LAYERS, 40, 4, 2, 16, slots=6, width=20, storage=storage, device=device)
    for pool in cache._stored:
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
        for found, wanted_pool in zip(*map(owned, (on_device, on_cpu)), strict=True):
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


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def decode(cache: PagedKVCache, query: Tensor, rows: Tensor, slopes: Tensor) -> Tensor:
    """A decode step of two layers: append, plan, attend, each layer with a mask of its own."""

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 5 + b)

    step, found = cache.begin(), []
    for layer, mask in enumerate((causal, window)):
        cache.append(step, layer, rows * 0.5**layer, rows * 0.5)
        # Each layer has the same query: the first one's rounding would grow in the second.
        found.append(cache.attend(step, layer, query, alibi, mask))
    return torch.stack(found, 1)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("backend", ["cuda", "cuda.triton"])
def test_a_replay_decodes_what_the_last_step_asked_for(backend: str, storage: str) -> None:
    """Lengths, pages and the number of sequences change under the graph, which allocates and
    compiles nothing."""
    caches = [
        PagedKVCache(
            2, 40, 16, 2, 64, slots=6, width=10, storage=storage, device=device, dtype=dtype
        )
        for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16))
    ]
    for cache in caches:
        for pool in cache._pools:
            if pool is not None:
                pool.fill_(torch.nan if pool.dtype.is_floating_point else 77)
    rng = random.Random(4)
    generator = torch.Generator().manual_seed(4)

    def drawn(heads: int) -> Tensor:
        return torch.randn(6, heads, 64, generator=generator).bfloat16()

    query, rows = drawn(4).cuda(), drawn(2).cuda()
    for cache in caches:
        for _ in range(6):
            cache.open()
        assert cache.step([(slot, 1) for slot in range(6)]) is not None
    on_cpu, on_device = caches
    slopes = SLOPES.cuda()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), anyflex.use_backend(backend):
        decode(on_device, query, rows, slopes)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), anyflex.use_backend(backend):
        out = decode(on_device, query, rows, slopes)
    with anyflex.use_backend("reference"):
        decode(on_cpu, query.cpu().float(), rows.cpu().float(), SLOPES)
        for turn in range(40):
            live = sorted(rng.sample(range(6), rng.randrange(1, 7)))
            if turn % 7 == 3:
                for cache in caches:
                    cache.trim(live[0], 0)
                    cache.close(live[-1])
                    assert cache.open() == live[-1]
            for cache in caches:
                assert cache.step([(slot, 1) for slot in live]) is not None
            new_query, new_rows = drawn(4), drawn(2)
            query.copy_(new_query)
            rows.copy_(new_rows)
            graph.replay()
            wanted = decode(on_cpu, new_query.float(), new_rows.float(), SLOPES)
            found = out.float().cpu()
            # Weights and results are rounded to bfloat16, and a device may round a quotient to the
            # next float8.
            assert (found - wanted)[: len(live)].abs().max() <= (
                0.15 if "fp8" in storage else 0.03
            )
            assert not found[len(live) :].any()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_pass_is_an_eager_one(mode: str) -> None:
    slopes = SLOPES.cuda()

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx)

    def run(cache: PagedKVCache, step: Any, rows: Tensor) -> Tensor:
        for layer in range(2):
            cache.append(step, layer, rows[:, :2] + layer, rows[:, 2:] * 2)
            rows = rows + cache.attend(step, layer, rows, alibi, causal)
        return rows

    compiled: Any = torch.compile(run, fullgraph=True, mode=mode)
    options = {"slots": 4, "width": 16, "device": "cuda", "dtype": torch.bfloat16}
    caches = [PagedKVCache(2, 64, 16, 2, 64, **options) for _ in range(2)]  # type: ignore[arg-type]
    slots = [[cache.open(), cache.open()] for cache in caches]
    with torch.no_grad():
        for counts in ((30, 7), (1, 1), (1, 1), (1, 0), (1, 1)):
            rows = torch.randn(sum(counts) + 1, 4, 64, device="cuda", dtype=torch.bfloat16)
            found, wanted = (
                call(cache, cache.step(list(zip(own, counts, strict=True))), rows)
                for call, cache, own in zip((compiled, run), caches, slots, strict=True)
            )
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
