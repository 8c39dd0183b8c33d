"""Forward on matrix units beside the dense formula in float64, in layouts at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from emulated_backend import SCHEDULE
from emulator import SCHEDULES, Numerics
from matrix_units import Shuffled
from soak import SOAK
from tensor_kernel import BARRIER, shuffled
from torch import Tensor

import anyflex
from anyflex import masks
from anyflex.plugin import PluginError, isolated, register
from anyflex.testing import posing
from anyflex_mps.shaders import CompileShader

Mod = Callable[..., Tensor]
MPP = {"mps": {"mpp": True}}
CLOSE = {torch.float16: 6e-3, torch.bfloat16: 5e-2}
"""Largest errors relative to the largest element, by dtype."""
DIMS = [(16, 16), (64, 64), (1, 9), (20, 33), (80, 48), (256, 256)]
BARRIERS = 6


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with isolated(), posing("mps", arch="apple10"):
        register("mps", Shuffled)
        yield


def dense(
    tensors: tuple[Tensor, Tensor, Tensor], score: Mod | None, mask: Mod | None
) -> tuple[Tensor, Tensor]:
    """Return out and lse in float64; 0 and -inf in rows without a live key."""
    query, key, value = (each.double() for each in tensors)
    heads, keys = query.shape[1], key.shape[2]
    key, value = (
        each.expand(query.shape[0], -1, -1, -1).repeat_interleave(heads // key.shape[1], 1)
        for each in (key, value)
    )
    scores = query @ key.mT / query.shape[-1] ** 0.5
    b, h, q, k = (
        torch.arange(size).view([-1 if at == axis else 1 for at in range(4)])
        for axis, size in enumerate((query.shape[0], heads, query.shape[2], keys))
    )
    if score is not None:
        scores = score(scores, b, h, q, k)
    live = torch.ones_like(scores, dtype=torch.bool)
    if mask is not None:
        live = mask(b, h, q, k).expand_as(scores)
    some = live.any(-1, keepdim=True)
    safe = scores.masked_fill(~live & some, -torch.inf)
    out = torch.where(some, safe.softmax(-1) @ value, 0.0)
    return out, torch.where(some[..., 0], safe.logsumexp(-1), -torch.inf)


def near(found: Tensor, wanted: Tensor, close: float) -> None:
    size = wanted.abs().nan_to_num(0, 0, 0).max().clamp(min=1e-2).item()
    error = (found.double() - wanted).abs().nan_to_num(torch.inf)
    same = (found.double() == wanted) | (error <= close * size)
    assert same.all(), f"{error[~same].max().item()} of {size}"


def spread(tensor: Tensor, way: str) -> Tensor:
    """Return the same numbers in another layout, NaN between them."""
    if way == "heads last":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if way == "columns apart":
        wide = torch.full((*tensor.shape, 2), float("nan"), dtype=tensor.dtype)
        wide[..., 0] = tensor
        return wide[..., 0]
    return tensor


def check(
    tensors: tuple[Tensor, Tensor, Tensor],
    score: Mod | None = None,
    mask: Mod | None = None,
    blocks: tuple[int, int] = (64, 32),
) -> None:
    """Compare a call with the dense formula, and see that matrix units computed it."""
    query, key, _ = tensors
    block_mask = None
    if mask is not None:
        lengths = query.shape[2], key.shape[2]
        block_mask = anyflex.create_block_mask(
            mask, None, query.shape[1], *lengths, BLOCK_SIZE=blocks
        )
    call = {"enable_gqa": True, "kernel_options": MPP, "backend": "mps"}
    found = anyflex.explain(*tensors, score, block_mask, **call)
    assert "prefill mpp 32x" in str(found)
    out, lse = anyflex.flex_attention(*tensors, score, block_mask, return_lse=True, **call)
    wanted, wanted_lse = dense(tensors, score, mask)
    near(out, wanted, CLOSE[query.dtype])
    near(lse, wanted_lse, 2e-5)


def drawn(
    seed: int,
    dtype: torch.dtype = torch.float16,
    *,
    heads: tuple[int, int] = (2, 1),
    lengths: tuple[int, int] = (75, 90),
    dims: tuple[int, int] = (16, 16),
    batch: tuple[int, int] = (1, 1),
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch[0], heads[0], lengths[0], dims[0]),
        (batch[1], heads[1], lengths[1], dims[0]),
        (batch[1], heads[1], lengths[1], dims[1]),
    ]
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, key, value


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    dtype = [*CLOSE][DIMS.index(dims) % 2]
    check(drawn(0, dtype, dims=dims, heads=(1, 1)), mask=masks.causal())


def mods(seed: int, rows: int, keys: int, heads: int) -> tuple[list[Mod | None], list[Mod | None]]:
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(heads, generator=generator)
    table = torch.randn(rows + keys, generator=generator)
    documents = torch.arange(max(rows, keys)) // 13
    scores: list[Mod | None] = [
        None,
        lambda s, b, h, q, k: s + bias[h] * (k - q) * 0.05,
        lambda s, b, h, q, k: torch.tanh(s * 0.5) * 3.0 + bias[h],
        lambda s, b, h, q, k: s * 0.7 + table[q - k + keys],
    ]
    live: list[Mod | None] = [
        None,
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: (q - k).abs() <= 20,
        lambda b, h, q, k: documents[q] == documents[k],
        lambda b, h, q, k: (q % 7 != 0) & (k > 2),
    ]
    return scores, live


@pytest.mark.parametrize("seed", range(100 if SOAK else 6))
def test_a_random_call(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCHEDULE, SCHEDULES[seed % len(SCHEDULES)])
    make = random.Random(seed)
    heads, ratio, batch = make.choice([1, 2]), make.choice([1, 2, 3]), make.choice([1, 2])
    lengths = make.choice([65, 75, 96, 130]), make.choice([1, 9, 33, 64, 130])
    tensors = drawn(
        seed,
        make.choice([torch.float16, torch.bfloat16]),
        heads=(heads * ratio, heads),
        lengths=lengths,
        dims=make.choice([(8, 16), (16, 8), (33, 20), (64, 64)]),
        batch=(batch, make.choice([1, batch])),
    )
    laid_out = tuple(
        spread(each, make.choice(["plain", "heads last", "columns apart"])) for each in tensors
    )
    scores, live = mods(seed, *lengths, heads * ratio)
    check(
        laid_out, make.choice(scores), make.choice(live),
        make.choice([(16, 16), (64, 32), (20, 56), (128, 128)]),
    )  # fmt: skip


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite_reach_only_rows_that_see_them(odd: float) -> None:
    query, key, value = drawn(0)
    value[0, 0, 40, 3] = odd
    out = anyflex.flex_attention(
        query, key, value, None, anyflex.create_block_mask(masks.causal(), None, None, 75, 90),
        enable_gqa=True, kernel_options=MPP, backend="mps",
    )  # fmt: skip
    reached = ~out.isfinite()
    assert reached[..., 40:, 3].all()
    assert reached.sum() == reached[..., 40:, 3].numel()
    seen = value.clone()
    seen[0, 0, 40, 3] = 0
    wanted, _ = dense((query, key, seen), None, masks.causal())
    near(out.masked_fill(reached, 0), wanted.masked_fill(reached, 0), 6e-3)


def test_a_row_of_nan_stays_one() -> None:
    query, key, value = drawn(0)
    query[0, 1, 33] = float("nan")
    out = anyflex.flex_attention(
        query, key, value, enable_gqa=True, kernel_options=MPP, backend="mps"
    )
    assert out[0, 1, 33].isnan().all()
    assert out.isnan().sum() == out[0, 1, 33].numel()


def test_gradients_and_max_scores_are_those_without_the_option() -> None:
    found = []
    for options in ({}, MPP):
        tensors = [each.requires_grad_() for each in drawn(1, dims=(20, 33))]
        out, aux = anyflex.flex_attention(
            *tensors, enable_gqa=True, kernel_options=options, backend="mps",
            return_aux=anyflex.AuxRequest(lse=True, max_scores=True),
        )  # fmt: skip
        gradients = torch.autograd.grad(out.float().square().sum(), tensors)
        found.append([out, aux.lse, aux.max_scores, *gradients])
    for plain, with_option in zip(*found, strict=True):
        near(with_option.detach(), plain.detach().double(), 6e-3)


def test_a_decoding_call_keeps_its_kernel() -> None:
    query, key, value = drawn(0, lengths=(1, 90))
    call = {"enable_gqa": True, "kernel_options": MPP, "backend": "mps"}
    assert "decode splits" in str(anyflex.explain(query, key, value, **call))
    out = anyflex.flex_attention(query, key, value, **call)
    near(out, dense((query, key, value), None, None)[0], 6e-3)


def faulty(change: Callable[[str], str]) -> type[Shuffled]:
    """Return a backend with another text of the kernel."""

    class Faulty(Shuffled):
        def compile_shader(self) -> CompileShader:
            def compiler(source: str) -> Any:
                if "kernel void forward_matmul(" in source:
                    source = change(source)
                return shuffled(source, race=True)

            return compiler

    return Faulty


def computed(backend: type[Shuffled]) -> tuple[Tensor, Tensor]:
    """Return a causal call's result by a backend, and that of the dense formula."""
    tensors = drawn(0, lengths=(75, 70), dims=(16, 20))
    mask = anyflex.create_block_mask(masks.causal(), None, None, 75, 70)
    with isolated():
        register("mps", backend)
        out = anyflex.flex_attention(
            *tensors, None, mask, enable_gqa=True, kernel_options=MPP, backend="mps"
        )
    return out, dense(tensors, None, masks.causal())[0]


@pytest.mark.parametrize(
    "numerics",
    [Numerics(flush_denormals=True), Numerics(ulps=4), Numerics(reversed_sums=True)],
    ids=["denormals flushed", "inexact", "sums reversed"],
)
def test_other_arithmetic_is_right_too(numerics: Numerics) -> None:
    class Other(Shuffled):
        def compile_shader(self) -> CompileShader:
            return partial(shuffled, numerics=numerics)

    near(*computed(Other), 6e-3)


@pytest.mark.parametrize("removed", range(BARRIERS))
def test_each_barrier_is_needed(removed: int) -> None:
    def without(source: str) -> str:
        head, *parts = source.split(BARRIER)
        assert len(parts) == BARRIERS
        return head + "".join(
            ("" if number == removed else BARRIER) + part for number, part in enumerate(parts)
        )

    with pytest.raises(PluginError, match="KernelFault: forward_matmul: data race"):
        computed(faulty(without))


FAULTS = [
    ("s_rows[tile_row * 32 + column] = s[i];", "s_rows[column * 32 + tile_row] = s[i];"),
    ("acc[i] *= factors[tile_row];", ""),
    ("acc[i] *= factors[tile_row];", "acc[i] *= factors[lane_row];"),
    ("x = acc[i] * inverse_sums[tile_row];", "x = acc[i] * inverse_sums[lane_row];"),
    ("q_row < end_row && column < 20", "column < 20"),
    ("q_row < end_row && column < 20", "q_row < end_row"),
    ("const int q_row = first_row + tile_row;", "const int q_row = first_row + lane_row;"),
    ("p_rows[at] = (half)weight;", "p_rows[at] = (half)x[j];"),
    ("int at = lane_row * 32 + j / 2 * 8", "int at = lane_row * 32 + j % 2 * 8"),
    ("at < end && (full", "(full"),
    ("factors[lane_row] = factor;", "factors[lane_row] = 1.0f;"),
    ("(32, 32, 32, false, false,", "(32, 32, 32, true, false,"),
    ("acc.is_valid_element(i)", "true"),
]


@pytest.mark.parametrize(("old", "new"), FAULTS if SOAK else FAULTS[::3])
def test_a_seeded_fault_is_found(old: str, new: str) -> None:
    found = []

    def change(source: str) -> str:
        found.append(old in source)
        return source.replace(old, new)

    with pytest.raises((PluginError, AssertionError), match=r"KernelFault| of "):
        near(*computed(faulty(change)), 6e-3)
    assert found and all(found)


def test_without_a_fault_the_same_call_is_right() -> None:
    near(*computed(faulty(str)), 6e-3)
