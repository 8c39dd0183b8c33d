"""Requests to FlashAttention-4, and results against the formula: a stand-in computes each request
densely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stand_in import Recorded, install
from torch import Tensor

import anyflex
from anyflex.plugin import FULL
from anyflex.testing import posing

BACKEND = "cuda.flash4"
SLOPES = torch.tensor([0.5, -0.25, 0.125, 0.3125])
DOCUMENTS = torch.tensor([0] * 70 + [1] * 100 + [2] * 130)
KEPT = torch.arange(300) % 3 > 0


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return install(monkeypatch)


def dense(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask_mod: Any
) -> tuple[Tensor, Tensor]:
    """out and lse in float64; rows without a live key are 0 and -inf."""
    ratio = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(ratio, 1) for each in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    index = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *index).to(scores)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*index), -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp() @ value, lse


def tensors(lengths: tuple[int, int], kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, lengths[0], 64), *[(2, kv_heads, lengths[1], 64)] * 2)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 40)


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (DOCUMENTS[q] == DOCUMENTS[k]) & KEPT[k] & (q % 7 > 0) & (k < 120 + 20 * h)


def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + SLOPES[h] * (k - q)


def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 3.0 * torch.tanh(score / 3.0)


def position(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k % 5) * 0.25 + b


@pytest.mark.parametrize("lengths", [(200, 200), (130, 200), (200, 190)], ids=str)
@pytest.mark.parametrize("mask_mod", [None, causal, window, documents])
@pytest.mark.parametrize("score_mod", [None, alibi, softcap, position])
def test_results_and_gradients_are_the_formula_s(
    score_mod: Callable[..., Tensor] | None,
    mask_mod: Callable[..., Tensor] | None,
    lengths: tuple[int, int],
    recorded: Recorded,
) -> None:
    inputs = [each.requires_grad_() for each in tensors(lengths)]
    leaves = [each.detach().double().requires_grad_() for each in inputs]
    mask = None
    if mask_mod is not None:
        mask = anyflex.create_block_mask(
            mask_mod, None, 4 if mask_mod is documents else None, *lengths
        )
    with posing("cuda", arch="sm_90"):
        out, lse = anyflex.flex_attention(
            *inputs, score_mod, mask, enable_gqa=True, return_lse=True, backend=BACKEND
        )
        generator = torch.Generator().manual_seed(1)
        dout = torch.randn(out.shape, generator=generator).bfloat16()
        dlse = torch.randn(lse.shape, generator=generator)
        gradients = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    wanted, wanted_lse = dense(*leaves, score_mod, mask_mod)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-6)
    live = wanted_lse != -torch.inf
    total = (wanted.nan_to_num() * dout).sum() + (wanted_lse.masked_fill(~live, 0) * dlse).sum()
    found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    for name, got, right in zip(
        ("out", "dq", "dk", "dv"), (out, *gradients), (wanted, *found), strict=True
    ):
        gap = (got.double() - right).abs().max()
        assert gap <= 1e-2 * right.abs().max(), name


@pytest.mark.parametrize("size", [16, (32, 128), (64, 48), 256], ids=str)
@pytest.mark.parametrize("score_mod", [None, alibi])
def test_blocks_of_any_size_become_tiles_and_structure_wins(
    score_mod: Callable[..., Tensor] | None, size: int | tuple[int, int], recorded: Recorded
) -> None:
    lengths = (300, 290)
    inputs = [each.requires_grad_() for each in tensors(lengths)]
    built = anyflex.create_block_mask(documents, None, 4, *lengths, BLOCK_SIZE=size)
    # Some blocks contradict the function.
    runs = built.runs.clone()
    runs[::3, 2] = FULL
    mask = anyflex.BlockMask.from_runs(
        built.offsets, runs, mask_mod=documents, seq_lengths=lengths, block_size=size
    )
    with posing("cuda", arch="sm_90"):
        out = anyflex.flex_attention(*inputs, score_mod, mask, enable_gqa=True, backend=BACKEND)
        out.sum().backward()
    for given in (recorded.forward, recorded.backward):
        assert given["block_sparse_tensors"].block_size in ((128, 128), (256, 128))
    found = [each.grad for each in inputs]
    again = [each.detach().double().requires_grad_() for each in inputs]
    wanted = anyflex.flex_attention(*again, score_mod, mask, enable_gqa=True, backend="reference")
    wanted.sum().backward()
    for got, want in zip((out, *found), (wanted, *(each.grad for each in again)), strict=True):
        assert (got.double() - want).abs().max() <= 2e-2 * want.abs().max()


def test_delta_and_lse_may_come_from_a_longer_row(recorded: Recorded) -> None:
    query, key, value = tensors((130, 300))
    leaves = [each.double().requires_grad_() for each in (query, key, value)]
    out, lse = dense(*leaves, None, None)
    dout = torch.ones_like(query)
    delta = (dout.double() * out.detach()).sum(-1).float()
    out.backward(dout.double())
    # Nobody reads it then.
    nothing = torch.full_like(query, torch.nan)
    with posing("cuda", arch="sm_90"):
        first, second = (
            anyflex.flex_attention_backward(
                dout,
                query,
                key[:, :, part],
                value[:, :, part],
                nothing,
                lse.detach().float(),
                delta=delta,
                enable_gqa=True,
                backend=BACKEND,
            )
            for part in (slice(0, 150), slice(150, 300))
        )
    found = [first.query.float() + second.query.float()]
    found += [
        torch.cat(pair, 2) for pair in ((first.key, second.key), (first.value, second.value))
    ]
    for got, leaf in zip(found, leaves, strict=True):
        assert (got.double() - leaf.grad).abs().max() <= 2e-2 * leaf.grad.abs().max()


@pytest.mark.parametrize(
    ("mask_mod", "lengths", "arguments"),
    [
        (causal, (300, 300), {"causal": True}),
        (window, (300, 300), {"window_size_left": 39, "window_size_right": 0}),
    ],
)
def test_a_band_is_given_as_arguments(
    mask_mod: Callable[..., Tensor],
    lengths: tuple[int, int],
    arguments: dict[str, object],
    recorded: Recorded,
) -> None:
    mask = anyflex.create_block_mask(mask_mod, None, None, *lengths)
    with posing("cuda", arch="sm_90"):
        inputs = [each.requires_grad_() for each in tensors(lengths)]
        out = anyflex.flex_attention(*inputs, None, mask, enable_gqa=True, backend=BACKEND)
        out.sum().backward()
        for given in (recorded.forward, recorded.backward):
            assert arguments.items() <= given.items() and "block_sparse_tensors" not in given
        # With lists, or with a diagonal that ends elsewhere, the mask is a function.
        anyflex.flex_attention(
            *inputs,
            None,
            mask,
            enable_gqa=True,
            backend=BACKEND,
            kernel_options={BACKEND: {"masks": "lists"}},
        )
        assert recorded.forward["block_sparse_tensors"].block_size == (128, 128)
        shorter = anyflex.create_block_mask(mask_mod, None, None, lengths[0] - 1, lengths[1])
        anyflex.flex_attention(
            inputs[0][:, :, 1:], *inputs[1:], None, shorter, enable_gqa=True, backend=BACKEND
        )
        assert not arguments.keys() & recorded.forward.keys()


def test_a_structure_that_is_no_band_is_given_as_lists(recorded: Recorded) -> None:
    mask = anyflex.create_block_mask(causal, None, None, 256, 256)
    runs = mask.runs.clone()
    runs[:, 2] = FULL
    bolder = anyflex.BlockMask.from_runs(
        mask.offsets, runs, mask_mod=causal, seq_lengths=(256, 256)
    )
    query, key, value = tensors((256, 256))
    with posing("cuda", arch="sm_90"):
        anyflex.flex_attention(query, key, value, None, bolder, enable_gqa=True, backend=BACKEND)
    assert "causal" not in recorded.forward


def test_run_time_numbers_stay_on_the_device(recorded: Recorded) -> None:
    query, key, value = tensors((130, 130))
    found = []
    with posing("cuda", arch="sm_90"):
        for factor in (2.0, 3.0, 4.0, 3.0):

            def scaled(
                score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, by: float = factor
            ) -> Tensor:
                return score * by

            anyflex.flex_attention(query, key, value, scaled, enable_gqa=True, backend=BACKEND)
            found.append(recorded.forward["aux_tensors"])
    numbers = [None if each is None else each[-1].tolist() for each in found]
    assert numbers == [None, [3.0], [4.0], [3.0]]
    assert found[1][-1] is found[3][-1]


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_nothing_needs_no_kernel(lengths: tuple[int, int], recorded: Recorded) -> None:
    inputs = [each.requires_grad_() for each in tensors(lengths)]
    with posing("cuda", arch="sm_90"):
        out = anyflex.flex_attention(*inputs, enable_gqa=True, backend=BACKEND)
        out.sum().backward()
    assert not out.any() and not any(each.grad.any() for each in inputs)
    assert not hasattr(recorded, "forward")
