"""Gradients of biases for each pair: their elements have one writer, and are summed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense import dense_attention
from torch import Tensor

import anyflex
from anyflex.plugin import differentiate, parse_graph
from anyflex.tracing.trace import trace_mod
from anyflex_cpu.owned_captured import NOTHING_OWNED, Owned, owned_captured

Mod = Callable[..., Any]


def owned_by(mod: Mod) -> Owned:
    traced = trace_mod(mod, "score")
    wanted = frozenset(range(len(traced.captured)))
    return owned_captured(differentiate(parse_graph(traced.text), wanted_captured=wanted))


FOUR, TWO, ONE = torch.zeros(2, 3, 8, 8), torch.zeros(8, 8), torch.zeros(8)


@pytest.mark.parametrize(
    ("mod", "owned"),
    [
        (lambda s, b, h, q, k: s + FOUR[b, h, q, k], Owned(frozenset({0}), 3)),
        (lambda s, b, h, q, k: s + FOUR[0, h, q, k], Owned(frozenset({0}), 2)),
        (lambda s, b, h, q, k: s + TWO[q, k], Owned(frozenset({0}), 0)),
        (lambda s, b, h, q, k: s + TWO[q, k // 2], NOTHING_OWNED),
        (lambda s, b, h, q, k: s + ONE[q - k + 7], NOTHING_OWNED),
        (lambda s, b, h, q, k: s + TWO[q, k] + TWO[k, q], Owned(frozenset({0}), 0)),
        (lambda s, b, h, q, k: s + FOUR[0, h, q, k] + FOUR[b, 0, q, k], Owned(frozenset({0}), 0)),
        (lambda s, b, h, q, k: s + TWO[q, k] * TWO[q, q], NOTHING_OWNED),
        (lambda s, b, h, q, k: s + FOUR[b, h, q, k] + ONE[h], Owned(frozenset({0}), 3)),
        (lambda s, b, h, q, k: s * 2, NOTHING_OWNED),
    ],
)
def test_every_read_must_have_the_key_among_its_indices(mod: Mod, owned: Owned) -> None:
    assert owned_by(mod) == owned


def ragged(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q + 40 * b) & (k < 190 - 60 * h)


# The size of the bias, batch, query heads, KV heads. The last has a bias above 2^18 elements for
# few heads; those before have heads enough to be owned, or too few.
CALLS = [
    ((3, 8, 200, 200), 3, 8, 8),
    ((3, 8, 200, 200), 3, 8, 2),
    ((1, 16, 200, 200), 3, 16, 16),
    ((3, 1, 200, 200), 3, 8, 8),
    ((1, 1, 200, 200), 2, 4, 4),
    ((1, 1, 700, 700), 1, 1, 1),
    ((1, 4, 300, 300), 2, 4, 4),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shared", [False, True], ids=["", "one kv batch"])
@pytest.mark.parametrize("interpreted", [False, True], ids=["jit", "interpreter"])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_gradients_are_those_of_the_formula(
    call: tuple[Any, ...], interpreted: bool, shared: bool, masked: bool, level: str
) -> None:
    size, batch, heads, kv_heads = call
    torch.manual_seed(0)
    length = size[-1]
    q = torch.randn(batch, heads, length, 16)
    k, v = (torch.randn(1 if shared else batch, kv_heads, length, 16) for _ in range(2))
    dout = torch.randn(batch, heads, length, 16)
    learned = [torch.randn(size, requires_grad=True), torch.randn(heads, requires_grad=True)]
    one = [extent == 1 for extent in size]

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        bias, slopes = learned
        pair = bias[0 if one[0] else b, 0 if one[1] else h, q_idx, kv_idx]
        return score + pair * 0.5 + slopes[h] * (kv_idx - q_idx) * 0.01

    options = {"cpu": {"mods": "interpreter"}} if interpreted else None
    mask_mod = ragged if masked else None
    mask = mask_mod and anyflex.create_block_mask(mask_mod, batch, heads, length, length)

    def gradients() -> tuple[Tensor, ...]:
        out = anyflex.flex_attention(
            q, k, v, mod, mask, enable_gqa=True, backend="cpu", kernel_options=options
        )
        return torch.autograd.grad(out, learned, dout)

    found = gradients()
    wide = [each.detach().double().requires_grad_() for each in learned]
    kept, learned = learned, wide
    out, _ = dense_attention(q, k, v, mod, mask_mod)
    wanted = torch.autograd.grad(out, wide, dout.double())
    learned = kept
    for each, right in zip(found, wanted, strict=True):
        assert float((each - right).abs().max()) <= 2e-5 * float(right.abs().max())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 3)
        for each, again in zip(found, gradients(), strict=True):
            assert torch.equal(each, again)
    finally:
        torch.set_num_threads(threads)
