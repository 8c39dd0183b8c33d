"""PagedKVCache under torch.compile: one graph, and no compile for each step's lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from anyflex.errors import ArgumentTypeError
from anyflex.packed.packed import Step
from anyflex.paging.cache import PagedKVCache
from anyflex.paging.storage import bytes_of
from tests.soak import only_in_soak

__all__: list[str] = []

LAYERS = 2
SLOW = only_in_soak("ten seconds each; plain storage does less than int8")


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def owned(cache: PagedKVCache) -> list[Tensor]:
    """Return what the pages of sequences hold."""
    pools = cache.key, cache.value, cache.key_scale, cache.value_scale
    return [bytes_of(pool) for pool in pools if pool is not None]


def made(storage: str) -> PagedKVCache:
    return PagedKVCache(LAYERS, 12, 4, 2, 8, slots=3, width=8, storage=storage)


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


@pytest.mark.parametrize(
    ("storage", "attends", "graphs"),
    [
        ("int8", False, 2),  # the second is that of any number of rows
        pytest.param("plain", False, 2, marks=SLOW),
        ("int8", True, 3),  # one more for steps of one token each
        pytest.param("plain", True, 3, marks=SLOW),
    ],
)
@torch.no_grad()
def test_a_compiled_pass_does_what_an_eager_one_does_whatever_its_lengths(
    storage: str, attends: bool, graphs: int
) -> None:
    caches = made(storage), made(storage)
    for cache in caches:
        for pool in cache._stored:
            pool.zero_()

    def run(cache: PagedKVCache, step: Step, rows: Tensor) -> list[Tensor]:
        found = [cache.positions(step, rows.shape[0])]
        for layer in range(LAYERS):
            cache.append(step, layer, rows[:, :2] + layer, rows[:, 2:4] * 2)
            if attends:
                found.append(cache.attend(step, layer, rows, mask_mod=causal))
        return found

    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(run, fullgraph=True, backend=counter)
    slots = [[cache.open(), cache.open()] for cache in caches]
    for counts in ((3, 1), (2, 0), (1, 1), (7, 2), (1, 1), (4, 5)):
        rows = torch.randn(sum(counts) + 1, 4, 8)  # one is padding
        outs = []
        for cache, own, call in zip(caches, slots, (run, compiled), strict=True):
            step = cache.step(list(zip(own, counts, strict=True)))
            outs.append(call(cache, step, rows))
        for eager, in_graph in zip(*outs, strict=True):
            assert torch.equal(in_graph, eager)  # one kernel, of pages as they are
        for eager, in_graph in zip(*map(owned, caches), strict=True):
            assert torch.equal(in_graph, eager)
    assert counter.frame_count <= graphs


@torch.no_grad()
def test_a_compiled_pass_serves_any_of_the_open_sequences_in_any_order() -> None:
    cache = made("plain")

    def run(step: Step, rows: Tensor) -> Any:
        cache.append(step, 0, rows[:, :2], rows[:, 2:4])
        return cache.attend(step, 0, rows, mask_mod=causal)

    compiled: Any = torch.compile(run, fullgraph=True, backend="eager")
    slots = [cache.open() for _ in range(3)]
    for wanted in ([2], [2, 0], [1], [0, 2, 1]):
        step = cache.step([(slots[each], 2) for each in wanted])
        assert step is not None
        rows = torch.randn(2 * len(wanted), 4, 8)
        assert torch.equal(compiled(step, rows), run(step, rows))


def test_a_wrong_call_in_a_compiled_program_is_named_as_in_an_eager_one() -> None:
    cache = made("plain")

    @torch.compile(fullgraph=True, backend="eager")
    def call(step: Step, key: Tensor) -> None:
        cache.append(step, 0, key, key)

    step = cache.step([(cache.open(), 2)])
    assert step is not None
    with pytest.raises(ArgumentTypeError, match="key must have the cache's dtype"):
        call(step, torch.zeros(2, 2, 8, dtype=torch.float16))
