"""Random calls, forward and backward, against the dense formula in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from emulated_backend import Emulated
from soak import SOAK
from torch import Tensor

import anyflex
from anyflex.plugin import isolated, register
from anyflex.testing import posing

Mod = Callable[..., Tensor]

CLOSE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
"""Largest errors relative to the largest element, by dtype."""


@pytest.fixture(autouse=True)
def gpu(seed: int) -> Iterator[None]:
    with isolated(), posing("mps", arch=f"apple{7 + seed % 4}"):
        register("mps", Emulated)
        yield


@dataclass(frozen=True)
class Call:
    """A drawn call, whose score mod is named."""

    query: Tensor
    key: Tensor
    value: Tensor
    captured: tuple[Tensor, ...]
    score: str
    mask: Mod | None
    blocks: tuple[int, int]
    scale: float

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        learned = [tensor for tensor in self.captured if tensor.is_floating_point()]
        return (self.query, self.key, self.value, *learned)


def _laid_out(tensor: Tensor, way: str) -> Tensor:
    """Return the same numbers in another layout."""
    if way == "heads last":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if way == "columns apart":
        wide = torch.full((*tensor.shape, 2), float("nan"), dtype=tensor.dtype)
        wide[..., 0] = tensor
        return wide[..., 0]
    if way == "part of rows":
        batch, heads, rows, columns = tensor.shape
        wide = torch.full((batch, heads, rows + 3, columns + 1), float("nan"), dtype=tensor.dtype)
        wide[:, :, 2:-1, 1:] = tensor
        return wide[:, :, 2:-1, 1:]
    return tensor


def _score_mods(bias: Tensor, table: Tensor, keys: int) -> dict[str, Mod | None]:
    return {
        "none": None,
        "slopes": lambda s, b, h, q, k: s + bias[h] * (k - q) * 0.05,
        "soft cap": lambda s, b, h, q, k: torch.tanh(s * 0.5) * 3.0 + bias[h],
        "distance": lambda s, b, h, q, k: s * 0.7 + table[q - k + keys],
        "by row": lambda s, b, h, q, k: s + table[q] * bias[h] * 0.3,
    }


def _mask_mods(documents: Tensor) -> dict[str, Mod | None]:
    return {
        "none": None,
        "causal": lambda b, h, q, k: q >= k,
        "window": lambda b, h, q, k: (q - k).abs() <= 20,
        "documents": lambda b, h, q, k: documents[q] == documents[k],
        "odd heads": lambda b, h, q, k: (q + k + h) % 3 != 0,
        "some rows": lambda b, h, q, k: (q % 7 != 0) & (k > 2),
    }


def drawn(seed: int) -> Call:
    """Return a call: shapes with tails, grouped heads, layouts, mods with tensors that learn."""
    make, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = make.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
    batch, kv_heads, ratio = make.choice([1, 2]), make.choice([1, 2]), make.choice([1, 2, 3])
    rows = make.choice([1, 3, 17, 40, 75])
    keys = make.choice([1, 9, 33, 70, 130])
    dim, value_dim = (make.choice([1, 8, 16, 20, 33, 64]) for _ in range(2))
    if make.random() < 0.15:
        dim, value_dim = make.choice([(128, 128), (256, 16), (96, 256)])

    def some(*shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=generator).to(dtype)
        layout = make.choice(["plain", "heads last", "columns apart", "part of rows"])
        return _laid_out(numbers, layout).requires_grad_()

    kv_batch = 1 if make.random() < 0.2 else batch
    query = some(batch, kv_heads * ratio, rows, dim)
    key, value = some(kv_batch, kv_heads, keys, dim), some(kv_batch, kv_heads, keys, value_dim)
    bias = torch.randn(kv_heads * ratio, generator=generator).requires_grad_()
    table = torch.randn(rows + keys + 1, generator=generator).requires_grad_()
    documents = torch.arange(max(rows, keys)) // 13
    scores, masks = _score_mods(bias, table, keys), _mask_mods(documents)
    return Call(
        query, key, value, (bias, table),
        make.choice(list(scores)), masks[make.choice(list(masks))],
        make.choice([(16, 16), (64, 32), (20, 56), (128, 128)]), make.choice([0.3, 1.0, -0.2]),
    )  # fmt: skip


def dense(call: Call, leaves: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse and the scores by the formula, in float64; out and lse are 0 and -inf in
    rows without a live key."""
    query, key, value, bias, table = leaves
    heads, keys = query.shape[1], key.shape[2]
    ratio = heads // key.shape[1]
    key, value = (each.repeat_interleave(ratio, 1) for each in (key, value))
    scores = query @ key.mT * call.scale
    b, h, q, k = (
        torch.arange(size).view([-1 if at == axis else 1 for at in range(4)])
        for axis, size in enumerate((query.shape[0], heads, query.shape[2], keys))
    )
    score = _score_mods(bias, table, keys)[call.score]
    if score is not None:
        scores = score(scores, b, h, q, k)
    live = torch.ones_like(scores, dtype=torch.bool)
    if call.mask is not None:
        live = call.mask(b, h, q, k).expand_as(scores)
    some = live.any(-1, keepdim=True)
    safe = scores.masked_fill(~live & some, -torch.inf)
    out = torch.where(some, safe.softmax(-1) @ value, 0.0)
    lse = torch.where(some[..., 0], safe.logsumexp(-1), -torch.inf)
    return out, lse, scores


def near(
    found: Tensor, wanted: Tensor, dtype: torch.dtype, name: str, summed: float = 0.0
) -> None:
    """Compare relatively to the largest element, or to a 20th of the largest sum of magnitudes
    that cancel in an element."""
    size = wanted.abs().nan_to_num(0, 0, 0).max().clamp(min=max(1e-2, summed / 20)).item()
    error = (found.double() - wanted).abs().nan_to_num(torch.inf)
    same = (found.double() == wanted) | (error <= CLOSE[dtype] * size)
    assert same.all(), f"{name}: {error[~same].max().item()} of {size}"


@pytest.mark.parametrize("seed", range(200 if SOAK else 8))
def test_a_random_call_is_right_forward_and_backward(seed: int) -> None:
    call = drawn(seed)
    mask = None
    if call.mask is not None:
        lengths = call.query.shape[2], call.key.shape[2]
        mask = anyflex.create_block_mask(
            call.mask, None, call.query.shape[1], *lengths, BLOCK_SIZE=call.blocks
        )
    score = _score_mods(*call.captured, call.key.shape[2])[call.score]
    torch.use_deterministic_algorithms(seed % 4 == 0)
    try:
        out, lse = anyflex.flex_attention(
            call.query, call.key, call.value, score, mask, scale=call.scale,
            enable_gqa=True, return_lse=True, backend="mps",
        )  # fmt: skip
        wide = tuple(leaf.detach().double().requires_grad_() for leaf in call.leaves)
        wanted, wanted_lse, scores = dense(call, wide)
        dtype = call.query.dtype
        near(out, wanted, dtype, "out")
        near(lse, wanted_lse, torch.float32, "lse")
        generator = torch.Generator().manual_seed(seed)
        dout = torch.randn(out.shape, generator=generator).to(dtype)
        dlse = torch.where(lse.isfinite(), torch.randn(lse.shape, generator=generator), 0.0)
        finite = wanted_lse.masked_fill(wanted_lse.isinf(), 0.0)
        *exact, dscores = torch.autograd.grad(
            (wanted * dout.double()).sum() + (finite * dlse.double()).sum(), (*wide, scores),
            allow_unused=True,
        )  # fmt: skip
        # A head's bias has a share of each score's gradient in its head.
        summed = {"bias": dscores.abs().sum((0, 2, 3)).max().item()}
        ours = torch.autograd.grad((out, lse), call.leaves, (dout, dlse), allow_unused=True)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, found, right in zip(("q", "k", "v", "bias", "table"), ours, exact, strict=True):
        if right is not None and found is not None:
            near(found, right, dtype, f"gradient of {name}", summed.get(name, 0.0))
        else:
            assert found is None or not found.any(), name
            assert right is None or not right.any(), name
