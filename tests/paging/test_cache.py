"""PagedKVCache on tensors: rows, copies and attention, with NaN wherever nobody's row is."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from anyflex.packed.packed import Step
from anyflex.paging.cache import PagedKVCache
from anyflex.paging.step_numbers import StepNumbers
from anyflex.paging.storage import STORAGES
from tests.paging.dense_attention import dense_attention
from tests.paging.poisoned_pages import places, poison

__all__: list[str] = []

pytestmark = pytest.mark.usefixtures("float64_numbers")

LAYERS, SIZE, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 4, 4, 2, 8, 6
SLOPES = 0.5 ** torch.arange(1.0, 5.0, dtype=torch.float64)
LIMITS = torch.tensor([2, 9, 0, 5])


def score(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - SLOPES[h] * (q_idx - kv_idx)


def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Causal with a window, and a beginning whose length depends on the slot."""
    return (q_idx >= kv_idx) & ((q_idx - kv_idx < 11) | (kv_idx < LIMITS[b]))


def made(pages: int, storage: str = "plain", slots: int = 4, width: int = 8) -> PagedKVCache:
    return PagedKVCache(
        LAYERS,
        pages,
        SIZE,
        KV_HEADS,
        DIM,
        VALUE_DIM,
        dtype=torch.float64,
        storage=storage,
        slots=slots,
        width=width,
    )


def rows(cache: PagedKVCache, name: str, layer: int, slot: int, length: int) -> Tensor:
    """Keys or values of a sequence as they are stored, [length, Hkv, D]."""
    pool, scale = getattr(cache, name), getattr(cache, f"{name}_scale")
    at = places(cache, slot, length)
    found: Tensor = pool[layer].transpose(1, 2)[at].double()
    return found if scale is None else found * scale[layer].transpose(1, 2)[at][..., None].double()


def assert_stored(found: Tensor, exact: Tensor, storage: str) -> None:
    largest = exact.abs().amax(-1, keepdim=True)
    budget = {
        "plain": torch.zeros_like(exact),
        "int8": largest / 127 * 0.5001 + 0 * exact,
        "fp8_e4m3": torch.maximum(exact.abs() * 2**-4, largest / 448 * 2**-10) * 1.0001,
    }[storage]
    assert ((found - exact).abs() <= budget).all()


@pytest.fixture(params=["cpu", "device"])
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page tables are also written as on a device, by operations."""
    made = StepNumbers.__init__

    def making(self: StepNumbers, *given: Any) -> None:
        made(self, *given)
        self._on_cpu = request.param == "cpu"

    monkeypatch.setattr(StepNumbers, "__init__", making)


class Server:
    """Does at random what a server does to a cache, and knows each sequence's keys and values."""

    def __init__(self, storage: str, seed: int) -> None:
        self.rng, self.storage = random.Random(seed), storage
        self.cache = made(11, storage)
        # [layers, length, Hkv, E + Ev] of each sequence.
        self.known: dict[int, Tensor] = {}
        self.refused = 0

    def act(self) -> None:
        for slot in list(self.known):
            if self.rng.random() < 0.1:
                self.cache.close(slot)
                del self.known[slot]
            elif self.rng.random() < 0.15:
                length = self.rng.randint(0, self.known[slot].shape[1])
                self.cache.trim(slot, length)
                self.known[slot] = self.known[slot][:, :length]
        while len(self.known) < 4 and self.rng.random() < 0.6:
            self.join()
        if self.known:
            self.feed()

    def join(self) -> None:
        if not self.known or self.rng.random() < 0.4:
            empty = torch.empty(LAYERS, 0, KV_HEADS, DIM + VALUE_DIM)
            self.known[self.cache.open()] = empty
            return
        parent = self.rng.choice(list(self.known))
        length = self.rng.randint(0, self.known[parent].shape[1])
        self.known[self.cache.open(parent, length)] = self.known[parent][:, :length]

    def feed(self) -> None:
        chosen = self.rng.sample(list(self.known), self.rng.randint(1, len(self.known)))
        wanted = []
        for slot in chosen:
            room = 8 * SIZE - self.known[slot].shape[1]
            wanted.append((slot, min(room, self.rng.choice((0, 1, 1, 3, 7)))))
        step = self.cache.step(wanted)
        if step is None:
            self.refused += 1
            return
        counts = [count for _, count in wanted]
        new = torch.randn(LAYERS, sum(counts), KV_HEADS, DIM + VALUE_DIM)
        for (slot, _), more in zip(wanted, new.split(counts, 1), strict=True):
            self.known[slot] = torch.cat([self.known[slot], more], 1)
        lengths = {slot: known.shape[1] for slot, known in self.known.items()}
        poison(self.cache, lengths)
        query = torch.randn(sum(counts), HEADS, DIM)
        for layer in range(LAYERS):
            # Two rows of padding, as a graph of fixed size has them.
            padded = torch.cat([new[layer], torch.full_like(new[layer][:1], torch.nan)] * 1)
            self.cache.append(step, layer, padded[..., :DIM], padded[..., DIM:])
            self.check(layer, lengths)
            self.attend(step, layer, query, wanted)

    def check(self, layer: int, lengths: dict[int, int]) -> None:
        for slot, length in lengths.items():
            for name, exact in self.parts(layer, slot).items():
                assert_stored(rows(self.cache, name, layer, slot, length), exact, self.storage)

    def parts(self, layer: int, slot: int) -> dict[str, Tensor]:
        key, value = self.known[slot][layer].split([DIM, VALUE_DIM], -1)
        return {"key": key, "value": value}

    def attend(self, step: Step, layer: int, query: Tensor, wanted: list[tuple[int, int]]) -> None:
        out = torch.full((len(query), HEADS, VALUE_DIM), torch.nan)
        self.cache.attend(step, layer, query, score, mask, out=out)
        counts = [count for _, count in wanted]
        for (slot, _), q, found in zip(
            wanted, query.split(counts), out.split(counts), strict=True
        ):
            length = self.known[slot].shape[1]
            k, v = (rows(self.cache, name, layer, slot, length) for name in ("key", "value"))
            expected = dense_attention(q, k, v, slot, score, mask)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("storage", STORAGES)
def test_every_sequence_has_its_own_rows_and_attends_to_them_alone(storage: str) -> None:
    server = Server(storage, 5)
    for _ in range(30):
        server.act()
    assert server.refused
    for slot in list(server.known):
        server.cache.close(slot)
    assert server.cache.free_pages == 11


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("storage", STORAGES)
def test_forks_that_write_one_page_in_one_step_get_copies_but_for_the_last(storage: str) -> None:
    cache = made(8, storage)
    a = cache.open()
    new = torch.randn(LAYERS, 9, KV_HEADS, DIM + VALUE_DIM)
    step = cache.step([(a, 6)])
    assert step is not None
    for layer in range(LAYERS):
        cache.append(step, layer, new[layer, :6, :, :DIM], new[layer, :6, :, DIM:])
    b, c = cache.open(a), cache.open(a)
    step = cache.step([(b, 1), (a, 1), (c, 1)])
    assert step is not None and cache.free_pages == 8 - 4
    for layer in range(LAYERS):
        cache.append(step, layer, new[layer, 6:, :, :DIM], new[layer, 6:, :, DIM:])
    for layer in range(LAYERS):
        for i, slot in enumerate((b, a, c)):
            exact = torch.cat([new[layer, :6], new[layer, 6 + i : 7 + i]])
            for name, part in (("key", exact[..., :DIM]), ("value", exact[..., DIM:])):
                assert_stored(rows(cache, name, layer, slot, 7), part, storage)


@pytest.mark.usefixtures("tables")
def test_many_changes_of_the_table_at_once_all_arrive() -> None:
    cache = PagedKVCache(1, 600, 1, 1, 1, slots=3, width=600)
    a = cache.open()
    assert cache.step([(a, 500)]) is not None
    b = cache.open(a)
    assert cache.step([(b, 1), (a, 1)]) is not None
    assert torch.equal(cache.page_table[a, :500], cache.page_table[b, :500])
    assert len(set(cache.page_table[b, :501].tolist()) | {int(cache.page_table[a, 500])}) == 502


def test_a_step_serves_the_class_of_its_longest_sequence() -> None:
    cache = made(40, slots=4, width=30)
    slots = [cache.open() for _ in range(3)]
    for counts, bound in (((1, 1, 0), 1), ((1, 2, 0), 64), ((65, 1, 1), 120)):
        step = cache.step(list(zip(slots, counts, strict=True)))
        assert step is not None and step.packed.max_q == bound
        assert step.packed.q_offsets.tolist() == [0, *torch.tensor(counts).cumsum(0), sum(counts)]


def test_pools_made_in_inference_mode_are_written_outside_of_it() -> None:
    with torch.inference_mode():
        cache = made(2)
    step = cache.step([(cache.open(), 1)])
    assert step is not None
    cache.append(step, 0, torch.zeros(1, KV_HEADS, DIM), torch.zeros(1, KV_HEADS, VALUE_DIM))


def test_a_step_outside_of_inference_mode_may_follow_one_inside() -> None:
    cache = made(4)
    slot = cache.open()
    with torch.inference_mode():
        cache.step([(slot, 1)])
    cache.step([(slot, 1)])
    cache.step([(slot, 1)])
    assert cache.length(slot) == 3
