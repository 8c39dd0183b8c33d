"""The kernels with Intel's configurations in Triton's interpreter, against a dense formula.

That says that tiles of these sizes give the right numbers, and nothing of Intel's compiler. bf16
is left out: the interpreter multiplies its bits as integers.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.testing import posing

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 is not set"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="there is no Triton to interpret with"
    ),
]

Mod = Callable[..., Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q + 20


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [tensor.requires_grad_() for tensor in drawn]


def dense(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None, mask: bool) -> Tensor:
    """The formula in float64: ALiBi by `slopes` / 16 before the mask `causal`."""
    query, key, value = (tensor.double() for tensor in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    rows, keys = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] / 16 * (keys - rows)
    if mask:
        scores = scores.masked_fill(keys > rows + 20, float("-inf"))
    return torch.softmax(scores, dim=-1) @ value


def check(lengths: tuple[int, int], width: int, dtype: torch.dtype, *, mods: bool) -> None:
    """Compare out and all gradients."""
    shapes = ((1, 2, lengths[0], width), *[(1, 1, lengths[1], width)] * 2, (2,))
    query, key, value, slopes = tensors = draw(*shapes, dtype=dtype)
    mask = anyflex.create_block_mask(causal, None, None, *lengths, BLOCK_SIZE=32) if mods else None

    def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + slopes[h] / 16 * (k - q)

    with posing("xpu"):
        out = anyflex.flex_attention(
            query, key, value, alibi if mods else None, mask, enable_gqa=True, backend="xpu"
        )
        wanted = tensors if mods else tensors[:3]
        dout = torch.ones_like(out) / 4
        gradients = torch.autograd.grad(out, wanted, dout)
    right = dense(query, key, value, slopes if mods else None, mods)
    right_gradients = torch.autograd.grad(right, wanted, dout.double())
    limit = 1e-5 if dtype is torch.float32 else 4e-3
    for got, exact in zip((out, *gradients), (right, *right_gradients), strict=True):
        expected = exact.detach()
        scale = max(1.0, float(expected.abs().max()))
        assert float((got.detach() - expected).abs().max()) <= limit * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_ragged_call_with_mods_and_grouped_heads(dtype: torch.dtype) -> None:
    check((75, 90), 40, dtype, mods=True)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_each_width_of_the_table(width: int) -> None:
    check((65, 70), width, torch.float16, mods=False)


def test_decoding() -> None:
    check((1, 150), 64, torch.float16, mods=False)


def test_no_descriptor_is_made_outside_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intel's compiler makes block loads of those that a kernel makes itself."""
    from anyflex_triton import programs

    def refuse(*arguments: object) -> None:
        raise AssertionError("a descriptor is made for an Intel GPU")

    monkeypatch.setattr(programs, "descriptor_of", refuse)
    check((64, 64), 64, torch.float16, mods=False)
