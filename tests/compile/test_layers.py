"""A model of several layers under torch.compile(fullgraph=True)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anyflex
from tests.compile.graphs import CountingBackend
from tests.soak import SOAK

__all__: list[str] = []

# The first two also differ in their masks' number of runs: values that differ become dynamic at
# once.
LENGTHS = (80, 130, 96, 112, 70)
LAYERS = 6 if SOAK else 3
DIM, HEADS = 16, 2


class Layer(nn.Module):
    """Attention with a learned bias per head, and its own fixed table and number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.project = nn.Linear(DIM, 3 * DIM)
        self.slope = nn.Parameter(torch.randn(HEADS) * 0.1)
        self.register_buffer("table", torch.randn(256) * 0.1)
        self.cap = 3.0 + 0.5 * number
        self.period = 2 + number

    def forward(self, x: Tensor, block_mask: Any) -> Tensor:
        """x: [B, L, DIM]."""
        batch, length, _ = x.shape
        heads = self.project(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        slope, table, cap, period = self.slope, self.table, self.cap, self.period

        def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return cap * torch.tanh((s + slope[h] * (k - q) + table[k % period]) / cap)

        out = anyflex.flex_attention(query, key, value, score_mod, block_mask)
        return x + out.transpose(1, 2).reshape(batch, length, DIM)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(i) for i in range(LAYERS))

    def forward(self, x: Tensor, block_mask: Any) -> Tensor:
        """x: [B, L, DIM]."""
        for layer in self.layers:
            x = layer(x, block_mask)
        return x


def batch(length: int) -> tuple[Tensor, Any]:
    generator = torch.Generator().manual_seed(length)
    document = torch.arange(length) // 30
    block_mask = anyflex.create_block_mask(
        lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
        1,
        1,
        length,
        length,
        BLOCK_SIZE=32,
    )
    return torch.randn((2, length, DIM), generator=generator), block_mask


def run(model: nn.Module, call: Callable[..., Tensor], length: int) -> list[Tensor]:
    """Output and gradients of one step."""
    model.zero_grad()
    x, block_mask = batch(length)
    out = call(x, block_mask)
    out.square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None for grad in grads)
    return [out.detach(), *(grad.clone() for grad in grads if grad is not None)]


def test_all_layers_and_five_lengths_take_two_graphs() -> None:
    model = Model()
    backend = CountingBackend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for length in LENGTHS:
        wanted = run(model, model, length)
        found = run(model, compiled, length)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    # One for the first length, one for any length.
    assert backend.graphs <= 2


def test_layers_compiled_one_by_one_share_their_graphs() -> None:
    model = Model()
    backend = CountingBackend()
    x, block_mask = batch(80)
    x.requires_grad_()  # as the first layer's output does
    wanted = model(x, block_mask)
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    # torch itself makes ints of modules constants of their graphs, unless told otherwise.
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        found = model(x, block_mask)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    # The layers differ in numbers and tensors: the second one makes the numbers dynamic.
    assert backend.graphs <= 2


@pytest.mark.parametrize(
    "values", [[0.25 * i for i in range(1, 13)], list(range(2, 14))], ids=["floats", "ints"]
)
def test_twelve_closed_over_numbers_take_two_graphs(values: list[float]) -> None:
    backend = CountingBackend()
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((1, 2, 20, 4), generator=generator) for _ in "qkv")

    def attend(query: Tensor, key: Tensor, value: Tensor, weight: float) -> Tensor:
        return anyflex.flex_attention(
            query, key, value, lambda s, b, h, q, k: s * 0.5 + (k * weight) / 7
        )

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for weight in values:
        found = compiled(query, key, value, weight)
        assert torch.equal(found, attend(query, key, value, weight)), weight
    assert backend.graphs <= 2


def test_twelve_scales_take_two_graphs() -> None:
    backend = CountingBackend()
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn((1, 2, 20, 4), generator=generator) for _ in "qkv")

    def attend(scale: float) -> Tensor:
        return anyflex.flex_attention(query, key, value, scale=scale)

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for i in range(12):
        assert torch.equal(compiled(0.1 + 0.05 * i), attend(0.1 + 0.05 * i))
    assert backend.graphs <= 2


def test_a_checkpointed_layer_is_compiled_and_gives_the_eager_gradients() -> None:
    generator = torch.Generator().manual_seed(6)
    tensors = [torch.randn((1, 2, 12, 4), generator=generator, dtype=torch.float64) for _ in "qkv"]
    slopes = torch.randn(2, generator=generator, dtype=torch.float64)
    given = [tensor.requires_grad_() for tensor in (*tensors, slopes)]

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return anyflex.flex_attention(
            query, key, value, lambda s, b, h, q, k: s * 1.5 + slopes[h] * (k - q)
        )

    def twice(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Any:
        out = checkpoint(layer, query, key, value, use_reentrant=False)
        return checkpoint(layer, out, key, value, use_reentrant=False).square().sum()

    wanted = torch.autograd.grad(twice(*given), given)
    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        torch.testing.assert_close(torch.autograd.grad(compiled(*given), given), wanted)
