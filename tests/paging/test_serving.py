"""A tiny transformer served from pages gives each request the logits that it has alone."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from anyflex.packed.packed import Step
from anyflex.paging.cache import PagedKVCache
from anyflex.paging.storage import STORAGES
from anyflex.plugin import hookimpl, isolated, register, register_hooks
from anyflex.tensors.tensor_facts import q_class
from tests.packed.dense_formula import Sequence, dense_formula
from tests.paging.poisoned_pages import poison
from tests.soak import SOAK

__all__: list[str] = []

pytestmark = pytest.mark.usefixtures("float64_numbers")

LAYERS, SIZE, HEADS, KV_HEADS, DIM, VOCABULARY, LONGEST = 2, 4, 4, 2, 8, 17, 40
# Powers of two: their products with distances are exact in float32 too.
SLOPES = 0.5 ** torch.arange(1.0, HEADS + 1, dtype=torch.float32)
SINKS = torch.tensor([0.3, -1.0, 2.0, -torch.inf], dtype=torch.float64)


class Setting(NamedTuple):
    """Backend that is forced, the dtype of model and cache, and the error that logits may have."""

    backend: str
    dtype: torch.dtype
    budget: float


def cpu_is_missing() -> bool:
    if importlib.util.find_spec("anyflex_cpu") is None:
        return True
    return bool(importlib.import_module("anyflex_cpu.library").find() is None)


REFERENCE = Setting("reference", torch.float64, 1e-12)
CPU = Setting("cpu", torch.float32, 5e-5)
SETTINGS = [
    pytest.param(REFERENCE, id="reference"),
    pytest.param(
        CPU,
        id="cpu",
        marks=pytest.mark.skipif(
            cpu_is_missing(), reason="anyflex-cpu isn't installed, or has no library here"
        ),
    ),
]


class Tiny(nn.Module):
    """A transformer of two layers; `attend(layer, q, k, v)` gives [T, HEADS, DIM]."""

    def __init__(self) -> None:
        super().__init__()
        width, size = HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM
        self.embed, self.where = nn.Embedding(VOCABULARY, width), nn.Embedding(LONGEST, width)
        self.qkv = nn.ModuleList(nn.Linear(width, size) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, tokens: list[int], positions: Tensor, attend: Any) -> Tensor:
        x = self.embed(torch.tensor(tokens, dtype=torch.int64)) + self.where(positions)
        for layer in range(LAYERS):
            normed = nn.functional.layer_norm(x, x.shape[-1:])
            qkv = self.qkv[layer](normed).unflatten(-1, (-1, DIM))
            heads = qkv.split([HEADS, KV_HEADS, KV_HEADS], -2)
            x = x + torch.tanh(self.out[layer](attend(layer, *heads).flatten(-2)))
        logits: Tensor = x @ self.embed.weight.T
        return logits


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - SLOPES[h] * (q_idx - kv_idx)


class Mods:
    """Mods of a model whose first layer has a window, and its second all keys before.

    Attributes:
        limits: int64 [slots], tokens of each slot's request that are seen from any distance. A
            server writes a request's number there when it gives it a slot.
    """

    def __init__(self, slots: int) -> None:
        self.limits = limits = torch.zeros(slots, dtype=torch.int64)

        def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (q_idx >= kv_idx) & ((q_idx - kv_idx < 7) | (kv_idx < limits[b]))

        self.masks = window, causal


def made(setting: Setting, pages: int, slots: int = 4, storage: str = "plain") -> PagedKVCache:
    return PagedKVCache(
        LAYERS,
        pages,
        SIZE,
        KV_HEADS,
        DIM,
        dtype=setting.dtype,
        storage=storage,
        slots=slots,
        width=LONGEST // SIZE,
    )


@torch.no_grad()
def fed(
    model: Tiny,
    cache: PagedKVCache,
    step: Step | None,
    tokens: list[int],
    backend: str,
    masks: tuple[Any, Any],
    score: Any = alibi,
    positions: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Logits of a step's tokens, their keys and values appended."""
    assert step is not None

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
        cache.append(step, layer, k, v)
        return cache.attend(step, layer, q, score, masks[layer], sinks=sinks, backend=backend)

    if positions is None:
        positions = cache.positions(step, len(tokens))
    return model(tokens, positions, attend)


@torch.no_grad()
def alone(
    model: Tiny,
    tokens: list[int],
    masks: tuple[Any, Any],
    score: Any = alibi,
    slot: int = 0,
    stored: Any = lambda rows: rows,
    sinks: Tensor | None = None,
) -> Tensor:
    """Logits of one request at once, by the dense formula in float64."""
    whole = Sequence(slice(0, len(tokens)), 0, slot, torch.arange(len(tokens)))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense_formula(q, stored(k), stored(v), [whole], score, masks[layer], sinks)[0]

    return copy.deepcopy(model).double()(tokens, torch.arange(len(tokens)), attend)


def assert_close(found: Tensor, expected: Tensor, budget: float) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=budget)


class Request:
    """A prompt that is continued by the likeliest tokens.

    Attributes:
        tokens: those of the prompt, and what was drawn.
        wanted: number of tokens at which it is done.
        limit: tokens that its first layer sees from any distance.
        seen: logits by position.
    """

    def __init__(self, rng: random.Random, beginning: list[int]) -> None:
        rest = [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 3, 6, 17)))]
        self.tokens = [*beginning, *rest]
        self.wanted = len(self.tokens) + rng.randint(1, 6)
        self.limit = rng.randint(0, 3)
        self.seen: dict[int, Tensor] = {}


class Server:
    """Requests that join, share beginnings, are fed in chunks, are preempted, and leave."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting, self.rng = setting, random.Random(seed)
        self.model, self.mods = Tiny().to(setting.dtype), Mods(4)
        self.cache = made(setting, 12)
        beginning = [self.rng.randrange(VOCABULARY) for _ in range(9)]
        self.requests = [Request(self.rng, beginning) for _ in range(6)]
        self.waiting, self.running = list(self.requests), dict[int, Request]()
        self.found = self.preempted = self.trimmed = 0

    def join(self) -> None:
        while self.waiting and len(self.running) < 4:
            request = self.waiting.pop(0)
            # The limit decides values behind the first layer, so it is part of what is looked up.
            slot, found = self.cache.prefix(request.tokens, [request.limit])
            self.running[slot] = request
            self.mods.limits[slot] = request.limit
            self.found += found

    def preempt(self, slot: int) -> None:
        if self.rng.random() < 0.5:
            self.cache.trim(slot, 0)  # it keeps its slot, and is fed again from the beginning
            self.trimmed += 1
        else:
            self.cache.close(slot)
            self.waiting.append(self.running.pop(slot))
            self.preempted += 1

    def turn(self) -> None:
        plan = []
        for slot, request in self.running.items():
            left = len(request.tokens) - self.cache.length(slot)
            plan.append((slot, min(left, self.rng.randint(1, 7))))
        self.rng.shuffle(plan)
        while (step := self.cache.step(plan)) is None:
            # The oldest one is never preempted, so that it gets done.
            newest = next(slot for slot in reversed(self.running) if slot in dict(plan))
            plan = [(slot, count) for slot, count in plan if slot != newest]
            self.preempt(newest)
        poison(self.cache, {slot: self.cache.length(slot) for slot in self.running})
        tokens = []
        for slot, count in plan:
            length = self.cache.length(slot)
            tokens += self.running[slot].tokens[length - count : length]
        masks = self.mods.masks
        logits = fed(self.model, self.cache, step, tokens, self.setting.backend, masks)
        counts = [count for _, count in plan]
        for (slot, count), part in zip(plan, logits.split(counts), strict=True):
            self.receive(slot, count, part)

    def receive(self, slot: int, count: int, logits: Tensor) -> None:
        request, length = self.running[slot], self.cache.length(slot)
        self.cache.commit(slot, request.tokens)
        request.seen.update(zip(range(length - count, length), logits, strict=True))
        if length == request.wanted:
            self.cache.close(slot)
            del self.running[slot]
        elif length == len(request.tokens):
            request.tokens.append(int(logits[-1].argmax()))

    def check(self) -> None:
        for request in self.requests:
            mods = Mods(1)
            mods.limits[0] = request.limit
            expected = alone(self.model, request.tokens, mods.masks)
            # A request has no logits of a beginning that it found.
            assert len(request.seen) >= request.wanted - len(request.tokens) + 1
            for position, row in request.seen.items():
                assert_close(row, expected[position], self.setting.budget)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seed", range(20 if SOAK else 2))
def test_requests_get_the_logits_that_they_get_alone(seed: int, setting: Setting) -> None:
    server = Server(setting, seed)
    while server.waiting or server.running:
        server.join()
        server.turn()
    assert server.found and server.preempted + server.trimmed
    assert server.cache.free_pages == 12
    server.check()


@pytest.mark.parametrize("setting", SETTINGS)
def test_forks_that_write_into_one_page_go_on_as_if_alone(setting: Setting) -> None:
    model, cache, masks = Tiny().to(setting.dtype), made(setting, 24), (causal, causal)
    prompt = [token % VOCABULARY for token in range(14)]
    a = cache.open()
    fed(model, cache, cache.step([(a, 14)]), prompt, setting.backend, masks)
    texts = {a: prompt, cache.open(a): prompt, cache.open(a, 13): prompt[:13]}
    rng = random.Random(3)
    for _ in range(4):
        new = {slot: [rng.randrange(VOCABULARY) for _ in range(1 + slot)] for slot in texts}
        texts = {slot: [*texts[slot], *new[slot]] for slot in texts}
        step = cache.step([(slot, len(tokens)) for slot, tokens in new.items()])
        poison(cache, {slot: len(text) for slot, text in texts.items()})
        tokens = [token for some in new.values() for token in some]
        logits = fed(model, cache, step, tokens, setting.backend, masks)
        parts = logits.split([len(some) for some in new.values()])
        for text, part in zip(texts.values(), parts, strict=True):
            assert_close(part, alone(model, text, masks)[-len(part) :], setting.budget)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_tree_of_drafts_has_the_logits_of_each_path_and_is_trimmed(setting: Setting) -> None:
    model, cache = Tiny().to(setting.dtype), made(setting, 10)
    prompt, drafts = [3, 1, 4, 1, 5, 9], [2, 6, 7, 8, 10]
    # Draft 0 has two followers, 1 and 2; 3 follows 1, and 4 follows 2.
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    sees = torch.zeros(5, 5, dtype=torch.bool)
    for path in paths:
        sees[path[-1], path] = True
    known = len(prompt)

    def tree(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row, column = (q_idx - known).clamp(0, 4), (kv_idx - known).clamp(0, 4)
        return (kv_idx < known) | ((kv_idx >= known) & sees[row, column])

    slot, other = cache.open(), cache.open()
    step = cache.step([(slot, known)])
    fed(model, cache, step, prompt, setting.backend, (causal, causal), None)
    # A draft's position is its depth in the tree. Another request is in the same step.
    depths = torch.tensor([known + len(path) - 1 for path in paths])
    step = cache.step([(slot, 5)])
    poison(cache, {slot: known + 5})
    logits = fed(model, cache, step, drafts, setting.backend, (tree, tree), None, depths)
    for path, row in zip(paths, logits, strict=True):
        text = [*prompt, *(drafts[draft] for draft in path)]
        expected = alone(model, text, (causal, causal), None)
        assert_close(row, expected[-1], setting.budget)
    # The path 0, 2 is accepted: the row of draft 0 stays, and 2 is fed in the place of 1.
    cache.trim(slot, known + 1)
    step = cache.step([(slot, 2), (other, 3)])
    poison(cache, {slot: known + 3, other: 3})
    tokens = [drafts[2], 11, 12, 13, 14]
    logits = fed(model, cache, step, tokens, setting.backend, (causal, causal), None)
    for text, rows in (
        ([*prompt, drafts[0], drafts[2], 11], logits[:2]),
        ([12, 13, 14], logits[2:]),
    ):
        expected = alone(model, text, (causal, causal), None)
        assert_close(rows, expected[-len(rows) :], setting.budget)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("storage", STORAGES)
def test_stored_numbers_and_sinks_are_those_of_the_formula(storage: str, setting: Setting) -> None:
    model, cache = Tiny().to(setting.dtype), made(setting, 30, storage=storage)
    sinks = SINKS.to(setting.dtype)
    rng, texts = random.Random(7), {cache.open(): list[int]() for _ in range(3)}
    mods = Mods(4)
    mods.limits[:] = torch.tensor([2, 0, 9, 5])
    found: dict[int, list[Tensor]] = {slot: [] for slot in texts}
    for counts in ((9, 3, 0), (1, 1, 6), (1, 0, 1), (4, 1, 1)):
        new = [[rng.randrange(VOCABULARY) for _ in range(count)] for count in counts]
        step = cache.step([(slot, len(some)) for slot, some in zip(texts, new, strict=True)])
        texts = {
            slot: [*text, *some] for (slot, text), some in zip(texts.items(), new, strict=True)
        }
        poison(cache, {slot: len(text) for slot, text in texts.items()})
        tokens = [token for some in new for token in some]
        logits = fed(model, cache, step, tokens, setting.backend, mods.masks, alibi, None, sinks)
        for slot, part in zip(texts, logits.split(list(counts)), strict=True):
            found[slot].append(part)

    def stored(rows: Tensor) -> Tensor:
        """Numbers that the pages hold of rows, by the formula of the storage."""
        kind = STORAGES[storage]
        if kind is None:
            return rows
        largest = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}[kind]
        scale = rows.float().abs().amax(-1, keepdim=True) / largest
        quotient = rows.float() / scale
        numbers = quotient.round() if kind is torch.int8 else quotient.to(kind)
        return numbers.double() * scale.double()

    for slot, text in texts.items():
        expected = alone(model, text, mods.masks, alibi, slot, stored, SINKS)
        assert_close(torch.cat(found[slot]), expected, setting.budget)
        # Sinks and 8 bits matter here, and the second one's error is small.
        exact = alone(model, text, mods.masks, alibi, slot, sinks=SINKS)
        without = alone(model, text, mods.masks, alibi, slot)
        assert (exact - without).abs().max() > 0.01
        error = (exact - expected).abs().max()
        assert error == 0 if storage == "plain" else 0 < error < 0.3


class Compiles:
    """Counts compilations by mask and q_class."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    @hookimpl
    def anyflex_compiled(self, spec: Any, backend: str, seconds: float) -> None:
        self.seen.append((str(spec.mask_graph), spec.q_class))


@pytest.mark.parametrize("setting", SETTINGS)
@torch.no_grad()
def test_steps_of_changing_batch_and_lengths_compile_once_a_mask_and_class(
    setting: Setting,
) -> None:
    rng, masks = random.Random(4), Mods(8).masks
    cache = made(setting, 60, slots=8)
    compiles, classes = Compiles(), set()
    with isolated():
        register("cpu", importlib.import_module("anyflex_cpu.backend").CpuBackend)
        register_hooks(compiles, "compiles")
        for _ in range(1000 if SOAK else 200):
            count = rng.randint(1, 6)
            slots = [cache.open() for _ in range(count)]
            longest = rng.choice((1, 5, LONGEST - 1))
            step = cache.step([(slot, rng.randint(1, longest)) for slot in slots])
            assert step is not None
            # The reference gets one dense call of all rows.
            total, own = int(step.packed.q_offsets[-1]), setting.backend != "reference"
            classes.add(q_class(step.packed.max_q if own else total))
            rows = torch.randn(total, HEADS, DIM, dtype=setting.dtype)
            for layer, mask in enumerate(masks):
                key = rows[:, :KV_HEADS]
                cache.append(step, layer, key, key)
                cache.attend(step, layer, rows, None, mask, backend=setting.backend)
            for slot in slots:
                cache.close(slot)
    assert {"one", "short"} <= classes
    # One step of each class and mask compiles; all others find it.
    assert len(compiles.seen) == len(set(compiles.seen)) == len(classes) * len(masks)
