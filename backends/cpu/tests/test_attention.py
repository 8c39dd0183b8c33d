"""Results and gradients against a dense formula, at every instruction-set level."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense import assert_near, dense_attention, dense_gradients
from torch import Tensor

import anyflex

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLOPES = torch.tensor([0.5, -0.25, 0.125, 0.3125, 0.0625, -0.5, 0.75, 1.0])


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k).abs() < 20


def rows_without_keys(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q % 3 > 0) & (k < 20 + 4 * h)


def first_keys_only(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k + b < 30


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 5 * torch.tanh(score / 5)


def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + SLOPES[h] * (k - q) / 16


MASKS: dict[str, tuple[Callable[..., Any] | None, bool, bool]] = {
    "none": (None, False, False),
    "causal": (causal, False, False),
    "window": (window, False, False),
    "a mask for each head": (rows_without_keys, False, True),
    "a mask for each batch": (first_keys_only, True, False),
}
MODS: dict[str, Callable[..., Any] | None] = {"none": None, "softcap": softcap, "alibi": alibi}


class Drawn:
    """One random configuration."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.kv_heads = draw.choice([1, 2])
        self.heads = self.kv_heads * draw.choice([1, 2, 4])
        self.batch = draw.choice([1, 2, 3])
        self.kv_batch = draw.choice([1, self.batch])
        self.lengths = draw.choice([1, 3, 17, 64, 100, 130]), draw.choice([1, 5, 33, 64, 129, 300])
        self.dim = draw.choice([1, 8, 20, 33, 64, 72, 128])
        self.value_dim = draw.choice([self.dim, self.dim, 1, 16, 40, 96])
        self.block = draw.choice([(16, 16), (32, 64), (128, 128), (1, 1), (16, 48)])
        self.mask = draw.choice(list(MASKS))
        self.mod = draw.choice(list(MODS))
        self.seed = seed

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        q_length, kv_length = self.lengths
        shapes = (
            (self.batch, self.heads, q_length, self.dim),
            (self.kv_batch, self.kv_heads, kv_length, self.dim),
            (self.kv_batch, self.kv_heads, kv_length, self.value_dim),
        )
        query, key, value = (
            torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes
        )
        return query, key, value

    def block_mask(self) -> anyflex.BlockMask | None:
        function, per_batch, per_head = MASKS[self.mask]
        if function is None:
            return None
        return anyflex.create_block_mask(
            function,
            self.batch if per_batch else None,
            self.heads if per_head else None,
            *self.lengths,
            BLOCK_SIZE=self.block,
        )

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items())


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_and_gradients_are_the_formula_s(
    dtype: torch.dtype, seed: int, level: str
) -> None:
    drawn = Drawn(seed)
    inputs = drawn.tensors(dtype)
    mask_mod, score_mod = MASKS[drawn.mask][0], MODS[drawn.mod]
    out, aux = anyflex.flex_attention(
        *inputs,
        score_mod,
        drawn.block_mask(),
        enable_gqa=True,
        return_aux=anyflex.AuxRequest(lse=True),
        backend="cpu",
    )
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(out, inputs, dout)
    wanted, wanted_lse = dense_attention(*inputs, score_mod, mask_mod)
    assert_near(out, wanted, dtype, f"out of {drawn}")
    # bf16 products, summed in float32.
    assert_near(aux.lse, wanted_lse, torch.float32, f"lse of {drawn}")
    wanted_gradients = dense_gradients(inputs, dout, score_mod, mask_mod)
    for name, found, expected in zip("qkv", gradients, wanted_gradients, strict=True):
        assert_near(found, expected, dtype, f"d{name} of {drawn}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_of_every_kind_are_read_in_place(dtype: torch.dtype, level: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query = some(2, 33, 4, 24).transpose(1, 2)  # [B, L, H, E] as projections leave it
    key = some(2, 2, 24, 47).mT  # last stride is not 1
    value = some(2, 2, 47, 2 * 16)[..., ::2]
    expanded = some(1, 2, 47, 24).expand(2, -1, -1, -1)
    odd = some(2 * 2 * 47 * 24 + 1)[1:].view(2, 2, 47, 24)  # aligned to nothing
    for each in (key, expanded, odd):
        out = anyflex.flex_attention(query, each, value, enable_gqa=True, backend="cpu")
        wanted, _ = dense_attention(query, each, value)
        assert_near(out, wanted, dtype)
        assert out.stride() == torch.empty_like(query[..., :16]).stride() or out.stride(-1) == 1


def test_gradients_of_expanded_keys_are_one_a_batch(level: str) -> None:
    query = torch.randn(3, 2, 20, 16, generator=torch.Generator().manual_seed(0))
    base = torch.randn(1, 2, 30, 16, generator=torch.Generator().manual_seed(1))
    key = base.expand(3, -1, -1, -1).detach().requires_grad_()
    value = base.expand(3, -1, -1, -1).detach().requires_grad_()
    out = anyflex.flex_attention(query, key, value, backend="cpu")
    found = torch.autograd.grad(out.sum(), (key, value))
    wanted = dense_gradients((query, key, value), torch.ones_like(out))[1:]
    for mine, expected in zip(found, wanted, strict=True):
        assert_near(mine, expected, torch.float32)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("batch", [0, 2])
def test_nothing_gives_nothing(lengths: tuple[int, int], batch: int) -> None:
    query = torch.randn(batch, 2, lengths[0], 8, requires_grad=True)
    key = torch.randn(batch, 2, lengths[1], 8, requires_grad=True)
    out, aux = anyflex.flex_attention(
        query, key, key, return_aux=anyflex.AuxRequest(lse=True, max_scores=True), backend="cpu"
    )
    assert torch.equal(out, torch.zeros_like(query))
    assert (aux.lse == -torch.inf).all() and (aux.max_scores == -torch.inf).all()
    for gradient in torch.autograd.grad(out.sum(), (query, key)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("length", [1, 8, 40])
@pytest.mark.parametrize("kv_batch", [0, 1])
def test_an_empty_batch_with_a_mask_for_each_entry_gives_nothing(
    kv_batch: int, length: int
) -> None:
    lengths = torch.empty(0, dtype=torch.int64)
    padding = anyflex.masks.padding(kv_lengths=lengths)
    mask = anyflex.create_block_mask(padding, 0, None, length, 40, BLOCK_SIZE=16)
    query = torch.randn(0, 2, length, 16, requires_grad=True)
    key = torch.randn(kv_batch, 2, 40, 16, requires_grad=True)

    def attention(query: Tensor, key: Tensor) -> Any:
        return anyflex.flex_attention(query, key, key, alibi, mask, return_lse=True, backend="cpu")

    with torch.no_grad():
        assert attention(query, key)[0].shape == (0, 2, length, 16)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for call in (attention, compiled) if length == 8 and kv_batch == 0 else (attention,):
        out, lse = call(query, key)
        assert out.shape == (0, 2, length, 16) and lse.shape == (0, 2, length)
        found = torch.autograd.grad(out.sum() + lse.sum(), (query, key))
        for gradient, of in zip(found, (query, key), strict=True):
            assert torch.equal(gradient, torch.zeros_like(of))


def test_a_sign_that_memory_does_not_show_counts() -> None:
    pairs = torch.view_as_complex(torch.randn(1, 1, 6, 8, 2))
    query = pairs.conj().imag
    assert query.is_neg()
    out = anyflex.flex_attention(query, query, query, backend="cpu")
    plain = -pairs.imag
    assert torch.equal(out, anyflex.flex_attention(plain, plain, plain, backend="cpu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_at_dead_keys_reaches_nothing(dtype: torch.dtype, level: str) -> None:
    query, key, value = Drawn(3).tensors(dtype)
    query, key, value = (
        torch.randn(2, 2, size, 16, generator=torch.Generator().manual_seed(size)).to(dtype)
        for size in (41, 53, 53)
    )
    mask = anyflex.create_block_mask(first_keys_only, 2, None, 41, 53, BLOCK_SIZE=16)

    def results(*inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = tuple(each.clone().requires_grad_() for each in inputs)
        out = anyflex.flex_attention(*leaves, None, mask, backend="cpu")
        return (out, *torch.autograd.grad(out.sum(), leaves))

    wanted = results(query, key, value)
    key[:, :, 30:] = torch.nan
    value[:, :, 30:40] = torch.nan
    value[:, :, 40:] = -torch.inf
    for found, expected in zip(results(query, key, value), wanted, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_non_finite_dout_reaches_its_row_and_the_keys_that_it_sees(
    backend: str, dtype: torch.dtype, level: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(1, 2, size, 16, generator=generator).to(dtype).requires_grad_()
        for size in (41, 53, 53)
    ]
    dout = torch.randn(1, 2, 41, 16, generator=generator).to(dtype)
    dout[0, 0, 5, 3], dout[0, 1, 40, 2] = torch.inf, torch.nan
    mask = anyflex.create_block_mask(window, None, None, 41, 53, BLOCK_SIZE=16)
    out = anyflex.flex_attention(*leaves, None, mask, backend=backend)
    dq, dk, dv = (each.isfinite() for each in torch.autograd.grad(out, leaves, dout))
    wanted_dq, wanted_dk, wanted_dv = (torch.ones_like(each) for each in (dq, dk, dv))
    for head, row, column in ((0, 5, 3), (1, 40, 2)):
        seen = slice(max(0, row - 19), row + 20)
        wanted_dq[0, head, row] = wanted_dk[0, head, seen] = False
        wanted_dv[0, head, seen, column] = False
    assert torch.equal(dq, wanted_dq)
    assert torch.equal(dk, wanted_dk)
    assert torch.equal(dv, wanted_dv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [100, 256])
def test_a_gradient_whose_terms_cancel_is_off_by_their_rounding_alone(
    dtype: torch.dtype, length: int
) -> None:
    query = torch.ones(1, 4, length, 64, dtype=dtype, requires_grad=True)
    bias = torch.zeros(4, dtype=dtype, requires_grad=True)
    out = anyflex.flex_attention(
        query, query, query, lambda s, b, h, q, k: s + bias[h], backend="cpu"
    )
    (found,) = torch.autograd.grad(out.sum(), bias)
    # P is 1 / length and dP is 64 for each pair of a head, in exact arithmetic too.
    magnitude = length * length * (1 / length) * 64
    assert found.abs().max() <= 1e-6 * magnitude
