"""Kernel of dQ and of captured tensors' gradients: what it leaves out where one of them is all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from emulated_backend import Emulated
from torch import Tensor

import anyflex
from anyflex.plugin import CapturedFacts, Spec, isolated, parse_graph, register
from anyflex.testing import posing
from anyflex_mps.queries import queries_shader

LEARNS = CapturedFacts(torch.float32, 1, True)
SPEC = Spec(
    "mps",
    "apple9",
    torch.float32,
    16,
    16,
    score_graph=parse_graph("input f32 - score;input i64 - h;load f32 1 0;add f32 0,2 -;=3"),
    captured=(LEARNS,),
    gradients=("k",),
)


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with isolated(), posing("mps"):
        register("mps", Emulated)
        yield


def test_only_dq_takes_a_third_product_and_a_second_pass() -> None:
    with_dq = queries_shader(replace(SPEC, gradients=("q",)), "floats", True).text
    assert with_dq.count("simdgroup_multiply_accumulate(") == 3
    assert "pass < 2" in with_dq and "isfinite(sums" in with_dq
    for sums in ("floats", "bounds", "integers"):
        without = queries_shader(SPEC, sums, False).text
        assert without.count("simdgroup_multiply_accumulate(") == 2
        assert "pass < 1" in without and "sums[d]" not in without and "ds[" not in without


@pytest.mark.parametrize("deterministic", [False, True])
def test_captured_tensors_may_be_all_that_learns(deterministic: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, dout = (torch.randn(1, 2, n, 16, generator=generator) for n in (40, 70, 40))
    table = torch.randn(120, generator=generator).requires_grad_()

    def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s * table[q + k]

    # A dead key's NaN reaches no gradient.
    given = key.clone()
    given[:, :, 7] = torch.nan
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: k != 7, None, None, 40, 70, BLOCK_SIZE=16, device="cpu"
    )
    torch.use_deterministic_algorithms(deterministic)
    try:
        out = anyflex.flex_attention(query, given, given, score, mask, backend="mps")
        (found,) = torch.autograd.grad(out, [table], dout)
    finally:
        torch.use_deterministic_algorithms(False)
    exact = table.detach().double().requires_grad_()
    scores = query.double() @ key.double().mT / 4.0
    scores = scores * exact[torch.arange(40).unsqueeze(-1) + torch.arange(70)]
    scores = scores.masked_fill(torch.arange(70) == 7, -torch.inf)
    (right,) = torch.autograd.grad(scores.softmax(-1) @ key.double(), [exact], dout.double())
    torch.testing.assert_close(found.double(), right, atol=1e-5, rtol=1e-5)


def by_key(t: Tensor, w: Tensor, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s * w[h, k % 7] + t[k]


def by_row(t: Tensor, w: Tensor, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s * w[h, q % 7] + t[q] * (k - q) * 0.05 + w[h, 0] * torch.sin(s)


def by_all(t: Tensor, w: Tensor, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s * w[h, k % 7] + t[k] + t[q] * w[h, q % 7] * s + t[(q + k) % 70] * w[h, 0]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mod", [by_key, by_row, by_all])
def test_additions_are_summed_first_where_a_key_or_a_row_decides_their_place(
    mod: Callable[..., Tensor], deterministic: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, dout = (torch.randn(2, 2, n, 16, generator=generator) for n in (43, 70, 43))
    learned = [torch.randn(shape, generator=generator) for shape in ((70,), (2, 7))]

    def lives(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q * 2 + k) % 5 != 0

    def gradients_of(tables: list[Tensor]) -> tuple[Tensor, ...]:
        out = anyflex.flex_attention(query, key, key, partial(mod, *tables), mask, backend="mps")
        return torch.autograd.grad(out, tables, dout)

    mask = anyflex.create_block_mask(lives, None, None, 43, 70, BLOCK_SIZE=24, device="cpu")
    tables = [table.clone().requires_grad_() for table in learned]
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = gradients_of(tables)
        again = gradients_of(tables)
    finally:
        torch.use_deterministic_algorithms(False)
    if deterministic:
        assert all(map(torch.equal, found, again))
    exact = [table.double().requires_grad_() for table in learned]
    places = [
        torch.arange(n).view([-1 if at == axis else 1 for at in range(4)])
        for axis, n in enumerate((2, 2, 43, 70))
    ]
    scores = mod(*exact, query.double() @ key.double().mT / 4.0, *places)
    weights = scores.masked_fill(~lives(*places), -torch.inf).softmax(-1)
    wanted = torch.autograd.grad(weights @ key.double(), exact, dout.double())
    for ours, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), right, atol=2e-5, rtol=2e-5)


def test_a_keys_sum_takes_one_atomic_addition_of_a_fragment() -> None:
    graph = parse_graph("input f32 - score;input i64 - kv_idx;load f32 1 0;add f32 0,2 -;=3")
    text = queries_shader(replace(SPEC, score_graph=graph), "floats", True).text
    assert text.count("op_add_float(g0 + ") == 1
    assert re.search(r"= op_sum_of_rows\(live \? grad : 0\.0f\);", text)
    assert re.search(r"if \(adds && P\[64\] != 0\) {\n    op_add_float\(g0 \+ ", text)


def test_one_lane_of_a_row_adds_its_sums() -> None:
    text = queries_shader(SPEC, "floats", True).text
    assert text.count("op_add_float(g0 + ") == 1
    assert re.search(r"if \(row < end_row && c == 0\)\n    captured_row_gradients\(", text)
