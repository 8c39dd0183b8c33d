"""Batch-invariant packed calls in Triton's interpreter: a sequence has the bits of it alone."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import pytest
import torch
from soak import SOAK
from torch import Tensor

import anyflex
from anyflex.plugin import Artifacts, Call, Kernel, Outputs, Spec, isolated, register
from anyflex.testing import posing

pytest.importorskip("triton", reason="there is no Triton to interpret with")

from anyflex_triton.backend import TritonBackend
from anyflex_triton.kernel import TritonKernel

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SLOPES = torch.randn(8, 6, generator=torch.Generator().manual_seed(9))
SINKS = torch.tensor([0.3, -torch.inf, 2.0, -1.0, 0.0, 1.0])


def slope(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - SLOPES[b, h] * (q_idx - kv_idx) * 0.01


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((q_idx >= kv_idx) & (q_idx - kv_idx < 40 + 3 * b + 20 * h)) | (kv_idx < 9)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


MODS = ((None, None), (None, causal), (slope, window), (slope, None))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Descriptions of the kernels that ran; outputs and workspace are NaN before, and structures
    are made as on a device, where bounds alone are known."""
    described: list[str] = []
    forward = TritonKernel.forward
    of_devices = importlib.import_module("anyflex.packed.row_blocks").static_row_blocks
    monkeypatch.setattr("anyflex.packed.own_layout.row_blocks", of_devices)

    def poisoned(kernel: TritonKernel, call: Call, out: Outputs) -> None:
        described.append(kernel.describe(call))
        for tensor in (out.out, out.lse, out.max_scores, *out.workspace):
            if tensor is not None:
                tensor.fill_(torch.nan)
        forward(kernel, call, out)

    monkeypatch.setattr(TritonKernel, "forward", poisoned)
    with isolated(), posing("cuda"):
        register("cuda.mine", TritonBackend)
        yield described


class Batch(NamedTuple):
    """Sequences of random lengths, and the mods of their calls.

    Args:
        queries, keys, values: [rows, H, D] of each sequence.
        slots: of each.
        page: rows of a page; 0: keys are packed.
        stored: keys and values are int8, with a scale for each token and head.
    """

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]
    slots: list[int]
    page: int
    mods: tuple[Any, Any]
    sinks: Tensor | None
    stored: bool

    def attend(
        self, numbers: list[int], chance: random.Random, backend: str = "cuda.mine"
    ) -> list[tuple[Tensor, ...]]:
        """Return out, lse and max_scores of some sequences of one call, in any pages and with some
        padding rows."""
        queries = [self.queries[number] for number in numbers]
        counts = [len(self.keys[number]) for number in numbers]
        slots = torch.tensor([self.slots[number] for number in numbers], dtype=torch.int32)
        spare = poison(queries[0], chance.randint(0, 3))
        ends = [0, *accumulate(map(len, queries))]
        memory = {"key": self.keys, "value": self.values}
        scales = {}
        if self.stored:
            wide = {name: [each.float() for each in parts] for name, parts in memory.items()}
            found = {
                name: [(each.abs().amax(-1) / 127).clamp(min=1e-3) for each in parts]
                for name, parts in wide.items()
            }
            memory = {
                name: [
                    (each / scale[..., None]).round().to(torch.int8)
                    for each, scale in zip(parts, found[name], strict=True)
                ]
                for name, parts in wide.items()
            }
            scales = {"k_scale": found["key"], "v_scale": found["value"]}
        parts = {
            name: [each[number] for number in numbers]
            for name, each in {**memory, **scales}.items()
        }
        offsets = torch.tensor(ends, dtype=torch.int32)
        if self.page == 0:
            tensors = {n: torch.cat([*each, poison(each[0], 3)]) for n, each in parts.items()}
            kv_offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
            batch = anyflex.Packed(offsets, kv_offsets=kv_offsets, slots=slots)
        else:
            pages = [-(-count // self.page) for count in counts]
            ids = chance.sample(range(sum(pages) + 2), sum(pages))
            width = max(1, *pages) + chance.randint(0, 2)
            table = torch.full((8, width), 2**31 - 1, dtype=torch.int32)
            tensors = {}
            for slot, count, first in zip(slots, pages, accumulate([0, *pages]), strict=False):
                table[slot, :count] = torch.tensor(ids[first : first + count], dtype=torch.int32)
            for name, each in parts.items():
                pool = poison(each[0], (sum(pages) + 2) * self.page).unflatten(0, (-1, self.page))
                for slot, rows in zip(slots, each, strict=True):
                    for column, begin in enumerate(range(0, len(rows), self.page)):
                        content = rows[begin : begin + self.page]
                        pool[table[slot, column], : len(content)] = content
                tensors[name] = pool.transpose(1, 2)
            lengths = torch.tensor(counts, dtype=torch.int32)
            bound = max(counts) if chance.random() < 0.5 else width * self.page
            batch = anyflex.Packed(
                offsets, lengths, page_table=table, slots=slots, max_kv=max(bound, 1)
            )
        out, aux = anyflex.flex_attention_packed(
            torch.cat([*queries, spare]),
            tensors.pop("key"),
            tensors.pop("value"),
            batch.begin(),
            *self.mods,
            enable_gqa=True,
            sinks=self.sinks,
            return_aux=anyflex.AuxRequest(lse=True, max_scores=True),
            backend=backend,
            batch_invariant=True,
            **tensors,
        )  # fmt: skip
        assert not out[ends[-1] :].any() and (aux.lse[ends[-1] :] == -torch.inf).all()
        results = (out, aux.lse, aux.max_scores)
        return [tuple(each[a:b].clone() for each in results) for a, b in pairwise(ends)]


def poison(like: Tensor, rows: int) -> Tensor:
    """Return rows of NaN, or of the lowest integer."""
    if not like.is_floating_point():
        return torch.full((rows, *like.shape[1:]), torch.iinfo(like.dtype).min, dtype=like.dtype)
    return torch.full((rows, *like.shape[1:]), torch.nan, dtype=like.dtype)


def drawn(seed: int) -> Batch:
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count, kv_heads, group = chance.randint(2, 5), chance.choice([1, 2]), chance.choice([1, 2, 3])
    dtype, dim = chance.choice([torch.float32, torch.float16]), chance.choice([16, 32])
    rows = [chance.choice([1, 1, 1, 2, 3, 4, 5, 20, 130]) for _ in range(count)]
    counts = [chance.choice([0, 1, 70, 200, 513, 600, 1050]) for _ in range(count)]
    heads = kv_heads * group

    def of(lengths: list[int], heads: int, dim: int) -> list[Tensor]:
        return [torch.randn(n, heads, dim, generator=generator).to(dtype) for n in lengths]

    return Batch(
        of(rows, heads, dim), of(counts, kv_heads, dim), of(counts, kv_heads, 16),
        chance.sample(range(8), count), chance.choice([0, 16, 48, 128]), MODS[seed % 4],
        SINKS[:heads] if seed % 3 == 0 else None, seed % 5 == 0,
    )  # fmt: skip


def expected(batch: Batch, number: int) -> tuple[Tensor, Tensor]:
    """Return out and lse of a sequence that isn't stored in 8 bits, in float64."""
    q = batch.queries[number].double().transpose(0, 1)
    group = q.shape[0] // batch.keys[number].shape[1]
    k, v = (
        each[number].double().repeat_interleave(group, 1).transpose(0, 1)
        for each in (batch.keys, batch.values)
    )
    score_mod, mask_mod = batch.mods
    at = (
        torch.tensor(batch.slots[number]),
        torch.arange(q.shape[0])[:, None, None],
        torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1],
        torch.arange(k.shape[1]),
    )
    scores = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
    scores = scores if score_mod is None else score_mod(scores, *at)
    if mask_mod is not None:
        scores = torch.where(mask_mod(*at), scores, -torch.inf)
    lse = scores.logsumexp(-1)
    whole = lse
    if batch.sinks is not None:
        whole = torch.where(lse == -torch.inf, lse, lse.logaddexp(batch.sinks.double()[:, None]))
    out = (scores - whole.nan_to_num(neginf=0.0)[..., None]).exp() @ v
    return out.transpose(0, 1), lse.T


def bits(tensors: tuple[Tensor, ...]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in tensors]


def differing(batch: Batch, seed: int, backend: str = "cuda.mine") -> list[int]:
    """Return the sequences that have other bits alone."""
    chance = random.Random(seed)
    everyone = list(range(len(batch.queries)))
    together = batch.attend(everyone, chance, backend)
    alone = [batch.attend([number], chance, backend)[0] for number in everyone]
    for number in everyone:
        if not batch.stored:
            wanted = expected(batch, number)
            tolerance = 2e-5 if batch.queries[0].dtype is torch.float32 else 4e-3
            for found, exact in zip(together[number], wanted, strict=False):
                torch.testing.assert_close(found.double(), exact, rtol=0, atol=tolerance)
    return [number for number in everyone if bits(alone[number]) != bits(together[number])]


@pytest.mark.parametrize("seed", [1, 4, 10, 14, 15, *range(100, 100 + 150 * SOAK)])
def test_each_sequence_of_a_random_call_has_the_bits_that_it_has_alone(
    seed: int, gpu: list[str]
) -> None:
    assert differing(drawn(seed), seed) == []
    assert all("batch-invariant" in each for each in gpu)


class Forgetful(TritonBackend):
    """Divides keys by bounds, and chooses kernels by them, though the call asks for bits that
    don't depend on these."""

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        return super().compile(dataclasses.replace(spec, batch_invariant=False), artifacts)


@pytest.mark.parametrize("rows", [[1, 1], [2, 20]])
def test_kernels_that_follow_the_batch_are_caught(rows: list[int]) -> None:
    """They divide keys by the longest sequence, or choose prefill for all where one is long."""
    register("cuda.forgetful", Forgetful)
    seed, counts = 3, [1000, 2600]
    batch = drawn(seed)._replace(
        queries=[torch.randn(n, 2, 16) for n in rows],
        keys=[torch.randn(n, 1, 16) for n in counts],
        values=[torch.randn(n, 1, 16) for n in counts],
        slots=[0, 1], page=0, mods=(None, None), sinks=None, stored=False,
    )  # fmt: skip
    assert 0 in differing(batch, seed, "cuda.forgetful")
    assert differing(batch, seed) == []


def test_no_bound_of_the_call_changes_where_splits_begin(gpu: list[str]) -> None:
    """Splits grow with the distance from the first key, so that long bounds have few."""
    queries, keys = [torch.randn(1, 1, 16)], [torch.randn(9000, 1, 16)]
    batch = Batch(queries * 2, keys + [keys[0][:30]], keys + [keys[0][:30]], [0, 1], 16,
                  (None, None), None, False)  # fmt: skip
    assert differing(batch, 0) == []
    assert gpu[0] == "decode splits=17, batch-invariant"
    assert gpu[-1].startswith("decode splits=1,")


def test_timing_configs_by_size_is_refused() -> None:
    batch = anyflex.Packed(torch.tensor([0, 3], dtype=torch.int32))
    rows = torch.randn(3, 1, 16)
    with pytest.raises(anyflex.ArgumentError, match=r"'cuda.mine'.\['autotune'\] finds a config"):
        anyflex.flex_attention_packed(
            rows, rows, rows, batch.begin(), batch_invariant=True, backend="cuda.mine",
            kernel_options={"cuda.mine": {"autotune": True}},
        )  # fmt: skip
