"""Results of `cpu.torch` against a dense formula, and its refusals.

Each kernel costs seconds of C++ compilation: few calls here, each with much in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import anyflex

BACKEND = "cpu.torch"
SLOPES = torch.tensor([0.5, -0.25, 0.125, 0.3125])
STRENGTH = torch.tensor(0.75)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: object, mask_mod: object
) -> Tensor:
    """out [B, Hq, L, Ev] in float64; rows without a live key are 0."""
    batch, heads, length, width = query.shape
    ratio = heads // key.shape[1]
    key, value = (each.double().repeat_interleave(ratio, 1) for each in (key, value))
    sizes = (batch, heads, length, key.shape[2])
    b, h, q, k = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    scores = query.double() @ key.mT * width**-0.5
    if callable(score_mod):
        scores = score_mod(scores, b, h, q, k)
    live = mask_mod(b, h, q, k) if callable(mask_mod) else torch.ones_like(scores).bool()
    return scores.masked_fill(~live, -torch.inf).softmax(-1).nan_to_num(0) @ value.double()


def tensors(dtype: torch.dtype, length: int = 41) -> tuple[Tensor, Tensor, Tensor]:
    """q [2, 4, L, 16], k [2, 2, 53, 16], v [2, 2, 53, 24]: no length is a multiple of a block."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, length, 16), (2, 2, 53, 16), (2, 2, 53, 24))
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, key, value


def mods_of(reach: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """A score mod that reads captured tensors and a number, and a mask mod that differs by head
    and leaves rows without keys."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(score * STRENGTH) + SLOPES[h] * (k - q) / reach + SLOPES[(q + k) % 4]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q % 3 > 0) & (k < reach + 4 * h)

    return score_mod, mask_mod


@pytest.mark.parametrize(
    ("dtype", "limit", "reaches"),
    # A number that changes becomes a slot, which isn't compiled again.
    [(torch.float32, 2e-5, (20, 24, 28)), (torch.bfloat16, 2e-2, (20,))],
    ids=["float32", "bfloat16"],
)
def test_mods_that_read_tensors_and_numbers_and_a_mask_a_head_give_the_formula_s_result(
    dtype: torch.dtype, limit: float, reaches: tuple[int, ...]
) -> None:
    inputs = tensors(dtype)
    for reach in reaches:
        score_mod, mask_mod = mods_of(reach)
        mask = anyflex.create_block_mask(mask_mod, None, 4, 41, 53, BLOCK_SIZE=16)
        out = anyflex.flex_attention(*inputs, score_mod, mask, enable_gqa=True, backend=BACKEND)
        wanted = dense_attention(*inputs, score_mod, mask_mod)
        assert out.dtype is dtype
        torch.testing.assert_close(out.double(), wanted, atol=limit, rtol=0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_one_query_row_without_a_mask_gives_the_formula_s_result(compiled: bool) -> None:
    inputs = tensors(torch.float32, length=1)
    call = partial(anyflex.flex_attention, enable_gqa=True, backend=BACKEND)
    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    out = call(*inputs)
    wanted = dense_attention(*inputs, None, None)
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("length", [0, 8])
def test_no_queries_and_no_keys_need_no_kernel(length: int) -> None:
    query = torch.ones(1, 1, length, 16)
    out = anyflex.flex_attention(query, query[:, :, :0], torch.ones(1, 1, 0, 24), backend=BACKEND)
    assert out.shape == (1, 1, length, 24) and not out.any()


def test_gradients_and_lse_are_refused() -> None:
    query, key, value = tensors(torch.float32)
    with pytest.raises(anyflex.BackendRefused, match="auxiliary output lse is not supported"):
        anyflex.flex_attention(
            query, key, value, enable_gqa=True, return_lse=True, backend=BACKEND
        )
    query.requires_grad_()
    with pytest.raises(anyflex.BackendRefused, match="gradient of q is not supported"):
        anyflex.flex_attention(query, key, value, enable_gqa=True, backend=BACKEND)


def test_it_is_asked_last() -> None:
    query, key, value = (each.requires_grad_() for each in tensors(torch.float32))
    trace = anyflex.explain(query, key, value, enable_gqa=True).to_dict()["trace"]
    names = [each["backend"] for each in trace]
    assert names[names.index(BACKEND) + 1 :] == ["reference"]
