"""Inputs of other types and layouts than the usual ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from emulated_backend import Emulated

import anyflex
from anyflex.plugin import isolated, register
from anyflex.testing import posing


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with isolated(), posing("mps"):
        register("mps", Emulated)
        yield


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[2]))


def test_a_whole_number_is_a_scale() -> None:
    query, key = drawn(1, 2, 20, 16), drawn(1, 2, 33, 16)
    slope = 0.25
    for score in (None, lambda s, b, h, q, k: s + slope * (q - k)):
        out = anyflex.flex_attention(query, key, key, score, scale=1, backend="mps")
        same = anyflex.flex_attention(query, key, key, score, scale=1.0, backend="mps")
        assert torch.equal(out, same)
    assert not torch.allclose(out, key.mean(2, keepdim=True).expand_as(out), atol=1e-2)


def test_an_lse_and_a_delta_from_elsewhere_may_have_any_layout() -> None:
    query, key, dout = drawn(2, 3, 20, 16), drawn(2, 3, 33, 16), drawn(2, 3, 20, 16)
    scores = query @ key.mT / 4.0
    lse, out = scores.logsumexp(-1), scores.softmax(-1) @ key
    delta = (out * dout).sum(-1)
    given = {"scale": 0.25, "backend": "mps"}
    found = [
        anyflex.flex_attention_backward(dout, query, key, key, out, each, delta=other, **given)
        for each, other in (
            (lse, delta),
            (lse.mT.contiguous().mT, delta.permute(2, 1, 0).contiguous().permute(2, 1, 0)),
        )
    ]
    leaves = [tensor.double().requires_grad_() for tensor in (query, key)]
    exact = (leaves[0] @ leaves[1].mT / 4.0).softmax(-1) @ leaves[1]
    wanted = torch.autograd.grad(exact, leaves, dout.double())
    for first, second in zip(*(each[:3] for each in found), strict=True):
        assert torch.equal(first, second)
    torch.testing.assert_close(found[0][0].double(), wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        (found[0][1] + found[0][2]).double(), wanted[1], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_dtype_decides_nothing(dtype: torch.dtype) -> None:
    query = drawn(1, 1, 20, 16)
    wanted = anyflex.flex_attention(query, query, query, backend="mps")
    torch.set_default_dtype(dtype)
    try:
        with isolated(), posing("mps"):
            register("mps", Emulated)
            found = anyflex.flex_attention(query, query, query, backend="mps")
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("block", [1 << 30, (1 << 31) - 1])
def test_a_block_may_be_longer_than_all_rows(block: int) -> None:
    query, key, dout = drawn(1, 2, 80, 16), drawn(1, 2, 90, 16), drawn(1, 2, 80, 16)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key)]
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, 80, 90, BLOCK_SIZE=block, device="cpu"
    )
    out = anyflex.flex_attention(leaves[0], leaves[1], leaves[1], None, mask, backend="mps")
    found = torch.autograd.grad(out, leaves, dout)
    exact = [tensor.double().requires_grad_() for tensor in (query, key)]
    scores = exact[0] @ exact[1].mT / 4.0
    dead = torch.arange(80).unsqueeze(-1) < torch.arange(90)
    wanted = scores.masked_fill(dead, -torch.inf).softmax(-1) @ exact[1]
    right = torch.autograd.grad(wanted, exact, dout.double())
    for ours, theirs in zip((out, *found), (wanted, *right), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)


def exact_gradients(*tensors: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return those of query, key and value, by the formula in float64."""
    query, key, value = leaves = [tensor.double().requires_grad_() for tensor in tensors]
    out = (query @ key.mT / query.shape[3] ** 0.5).softmax(-1) @ value
    return torch.autograd.grad(out, leaves, dout.double())


@pytest.mark.parametrize("axis", [2, 3], ids=["rows", "columns"])
@pytest.mark.parametrize("rows", [3, 66])
def test_elements_of_a_gradient_may_lie_far_apart(rows: int, axis: int) -> None:
    """Only written pages of the memory between them exist."""
    shape = (1, 1, rows, 3)
    strides = [1, 1, 3, 1]
    strides[axis] = (1 << 31) // (shape[axis] - 1) + 64
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = torch.empty(last + 1, dtype=torch.float16)
    dout = memory.as_strided(shape, strides).copy_(drawn(*shape))
    tensors = [drawn(*sizes).half() for sizes in (shape, (1, 1, 20, 3), (1, 1, 20, 3))]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = anyflex.flex_attention(*leaves, backend="mps")
    found = torch.autograd.grad(out, leaves, dout)
    for ours, right in zip(found, exact_gradients(*tensors, dout=dout), strict=True):
        torch.testing.assert_close(ours.double(), right, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_an_infinite_gradient_counts_whatever_its_weight(dtype: torch.dtype) -> None:
    query, key, value = (torch.zeros(1, 1, rows, 16, dtype=dtype) for rows in (3, 70, 70))
    query[0, 0, :, 0] = 1.0
    # Weights of the last keys are below the least number of each type.
    key[0, 0, 60:, 0] = -200.0
    dout = drawn(1, 1, 3, 16).to(dtype)
    dout[0, 0, 1, 5], dout[0, 0, 1, 6] = torch.inf, -torch.inf
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: k != 65, None, None, 3, 70, BLOCK_SIZE=16, device="cpu"
    )
    found = {}
    for backend in ("mps", "reference"):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        out = anyflex.flex_attention(*leaves, None, mask, scale=1.0, backend=backend)
        found[backend] = torch.autograd.grad(out, leaves, dout)
    for ours, right in zip(found["mps"], found["reference"], strict=True):
        torch.testing.assert_close(ours, right, atol=4e-3, rtol=4e-3, equal_nan=True)
    dv = found["mps"][2][0, 0]
    live = torch.arange(70) != 65
    assert dv[live, 5].eq(torch.inf).all() and dv[live, 6].eq(-torch.inf).all()
    assert dv[65].eq(0).all()
