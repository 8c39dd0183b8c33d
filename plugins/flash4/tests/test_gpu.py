"""Results on the GPU against a dense formula; skipped, with the reason, where it can't run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from test_kernel import alibi, causal, dense, position, softcap, window
from torch import Tensor

import anyflex

BACKEND = "cuda.flash4"
DOCUMENTS = torch.tensor([0] * 170 + [1] * 100 + [2] * 300)
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(
        importlib.util.find_spec("cutlass") is None, reason="flash-attn-4 is not installed"
    ),
]

ScoreMod = Callable[..., Tensor]


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    ids = DOCUMENTS.to(q.device)
    return (ids[q] == ids[k]) & (q % 7 > 0) & (k < 300 + 50 * h)


def on_device(mod: ScoreMod | None) -> ScoreMod | None:
    """The mod with its captured tensors on the GPU."""
    if mod is alibi:
        slopes = torch.tensor([0.5, -0.25, 0.125, 0.3125], device="cuda")
        return lambda s, b, h, q, k: s + slopes[h] * (k - q)
    if mod is documents:
        ids = DOCUMENTS.cuda()
        return lambda b, h, q, k: (ids[q] == ids[k]) & (q % 7 > 0) & (k < 300 + 50 * h)
    return mod


def check(
    lengths: tuple[int, int],
    width: int,
    score_mod: ScoreMod | None = None,
    mask_mod: ScoreMod | None = None,
    *,
    kv_heads: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    options: dict[str, str] | None = None,
) -> None:
    """Compare out, lse and gradients with the formula's."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, lengths[0], width), *[(2, kv_heads, lengths[1], width)] * 2)
    inputs = [
        torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_()
        for shape in shapes
    ]
    mask = None
    if mask_mod is not None:
        heads = 4 if mask_mod is documents else None
        mask = anyflex.create_block_mask(on_device(mask_mod), None, heads, *lengths, device="cuda")
    out, lse = anyflex.flex_attention(
        *inputs,
        on_device(score_mod),
        mask,
        enable_gqa=True,
        return_lse=True,
        backend=BACKEND,
        kernel_options=None if options is None else {BACKEND: options},
    )
    dout = torch.randn(out.shape, generator=generator).to("cuda", dtype)
    dlse = torch.randn(lse.shape, generator=generator).to("cuda")
    found = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    leaves = [each.detach().cpu().double().requires_grad_() for each in inputs]
    wanted, wanted_lse = dense(*leaves, score_mod, mask_mod)
    dead = wanted_lse == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, dead)
    torch.testing.assert_close(lse.double().cpu(), wanted_lse, atol=1e-2, rtol=1e-4)
    total = (wanted.nan_to_num() * dout.cpu()).sum()
    total = total + (wanted_lse.masked_fill(dead, 0) * dlse.cpu()).sum()
    right = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    for name, got, want in zip(
        ("out", "dq", "dk", "dv"), (out, *found), (wanted, *right), strict=True
    ):
        gap = (got.double().cpu() - want).abs().max()
        assert gap <= 3e-2 * want.abs().max(), (name, float(gap), float(want.abs().max()))


@pytest.mark.parametrize("score_mod", [None, alibi, softcap, position])
@pytest.mark.parametrize("mask_mod", [None, causal, documents])
def test_mods_and_masks(score_mod: ScoreMod | None, mask_mod: ScoreMod | None) -> None:
    check((570, 570), 128 if mask_mod is causal else 64, score_mod, mask_mod)


@pytest.mark.parametrize("options", [None, {"masks": "lists"}], ids=["arguments", "lists"])
def test_a_window_as_arguments_and_as_lists(options: dict[str, str] | None) -> None:
    check((500, 500), 64, None, window, kv_heads=2, options=options)


@pytest.mark.parametrize("lengths", [(1, 700), (130, 570), (570, 130)], ids=str)
def test_other_lengths(lengths: tuple[int, int]) -> None:
    check(lengths, 64, None, causal, kv_heads=2, dtype=torch.float16)


@pytest.mark.parametrize("width", [64, 96, 128])
def test_head_dims(width: int) -> None:
    check((300, 300), width, None, causal)


@pytest.mark.parametrize("score_mod", [alibi, softcap, position])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_score_mods_of_grouped_heads(score_mod: ScoreMod, kv_heads: int) -> None:
    check((70, 50), 64, score_mod, None, kv_heads=kv_heads)
    check((300, 300), 64, score_mod, causal, kv_heads=kv_heads)
