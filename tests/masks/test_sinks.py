"""with_sinks is attention with one more score a head, whose value is 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex import AuxRequest, with_sinks
from anyflex.errors import ArgumentError, ArgumentTypeError

__all__: list[str] = []


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_one_more_column(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor, live: Tensor
) -> Tensor:
    """The definition: a softmax over the keys and the sink, of which the sink is dropped."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    scores = torch.where(live, scores, -math.inf)
    column = sink[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ value


@pytest.mark.usefixtures("float64_numbers")
def test_values_and_gradients_are_those_of_one_more_column() -> None:
    leaves = [drawn(2, 3, 9, 4, seed=1), drawn(2, 3, 12, 4, seed=2), drawn(2, 3, 12, 5, seed=3)]
    leaves.append(drawn(3, seed=4))
    for leaf in leaves:
        leaf.requires_grad_()
    mask_mod = anyflex.masks.causal(-2)  # the first two rows are dead
    live = anyflex.create_mask(mask_mod, 1, 1, 9, 12)
    mask = anyflex.create_block_mask(mask_mod, 1, 1, 9, 12, BLOCK_SIZE=4)

    wanted = with_one_more_column(*leaves, live)
    out, aux = anyflex.flex_attention(
        *leaves[:3], block_mask=mask, return_aux=AuxRequest(lse=True)
    )
    found = with_sinks(out, aux.lse, leaves[3])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    assert not found[:, :, :2].any()

    weights = drawn(2, 3, 9, 5, seed=6)
    for a, b in zip(
        torch.autograd.grad(found, leaves, weights),
        torch.autograd.grad(wanted, leaves, weights),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_it_is_differentiable_in_all_three() -> None:
    inputs = (drawn(2, 2, 3, 2, seed=1), drawn(2, 2, 3, seed=2), drawn(2, seed=3))
    assert torch.autograd.gradcheck(with_sinks, [t.requires_grad_() for t in inputs])
    assert torch.autograd.gradgradcheck(with_sinks, inputs)


@pytest.mark.parametrize("sink", [0.0, -math.inf, math.inf])
def test_a_dead_row_is_0_with_gradients_0(sink: float) -> None:
    out = torch.zeros(1, 2, 3, 4, requires_grad=True)
    lse = torch.full((1, 2, 3), -math.inf).requires_grad_()
    sinks = torch.full((2,), sink).requires_grad_()
    found = with_sinks(out, lse, sinks)
    assert not found.any()
    for grad in torch.autograd.grad(found, [out, lse, sinks], torch.ones_like(found)):
        assert not grad.any() and grad.isfinite().all()


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    out, lse = drawn(1, 2, 3, 4, dtype=torch.float32), drawn(1, 2, 3, dtype=torch.float32)
    assert torch.equal(with_sinks(out, lse, torch.full((2,), -math.inf)), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_short_out_is_rounded_once(dtype: torch.dtype) -> None:
    out, lse = drawn(1, 2, 5, 4).to(dtype), drawn(1, 2, 5).float()
    sink = drawn(2, seed=7).to(dtype).requires_grad_()
    found = with_sinks(out, lse, sink)
    exact = out.double() * torch.sigmoid(lse.double() - sink.double()[None, :, None])[..., None]
    assert found.dtype is dtype
    assert torch.equal(found, exact.to(dtype))
    found.sum().backward()
    assert sink.grad is not None and sink.grad.dtype is dtype


def test_it_compiles_into_the_graph_of_the_call() -> None:
    q, k, v = (drawn(1, 2, 6, 4, seed=i, dtype=torch.float32).requires_grad_() for i in range(3))
    sink = drawn(2, dtype=torch.float32).requires_grad_()

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        out, aux = anyflex.flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
        return anyflex.with_sinks(out, aux.lse, sink)

    wanted = attend(q, k, v, sink)
    wanted_grads = torch.autograd.grad(wanted.square().sum(), [q, k, v, sink])
    torch._dynamo.reset()
    found = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v, sink)
    grads = torch.autograd.grad(found.square().sum(), [q, k, v, sink])
    for a, b in zip([found, *grads], [wanted, *wanted_grads], strict=True):
        torch.testing.assert_close(a, b)


OUT, LSE, SINK = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 5), torch.zeros(3)

REFUSED: dict[str, tuple[tuple[Any, Any, Any], type[Exception], str]] = {
    "no tensor": (
        (OUT, LSE, 0.0),
        ArgumentTypeError,
        r"sink must be a Tensor \[3\], .* got float",
    ),
    "the whole aux": (
        (OUT, anyflex.AuxOutput(lse=LSE), SINK),
        ArgumentTypeError,
        "lse must be a Tensor, got AuxOutput. Give its .lse.",
    ),
    "an out of rank 3": (
        (OUT[0], LSE, SINK),
        ArgumentError,
        r"out must have shape \[B, Hq, L, Ev\], got \[3, 5, 4\]",
    ),
    "an out of ints": ((OUT.int(), LSE, SINK), ArgumentTypeError, "got torch.int32"),
    "an lse of out's short dtype": (
        (OUT.bfloat16(), LSE.bfloat16(), SINK),
        ArgumentTypeError,
        "lse must be torch.float32 for an out of torch.bfloat16, got torch.bfloat16",
    ),
    "an lse that is shorter than float64": (
        (OUT.double(), LSE, SINK),
        ArgumentTypeError,
        "lse must be torch.float64 for an out of torch.float64, got torch.float32",
    ),
    "an lse of other rows": (
        (OUT, LSE[:, :, 1:], SINK),
        ArgumentError,
        r"lse must have shape \[2, 3, 5\], got \[2, 3, 4\]",
    ),
    "a sink of ints": ((OUT, LSE, SINK.int()), ArgumentTypeError, "sink must be floating"),
    "a sink of the key heads": (
        (OUT, LSE, SINK[:1]),
        ArgumentError,
        r"sink must have shape \[3\], one number for each query head, got \[1\]",
    ),
    "a sink of rank 2": (
        (OUT, LSE, SINK[None]),
        ArgumentError,
        r"sink must have shape \[3\], .* got \[1, 3\]",
    ),
    "a sparse sink": (
        (OUT, LSE, SINK.to_sparse()),
        ArgumentError,
        r"sink must be a strided tensor, got torch.sparse_coo; use sink.to_dense\(\)",
    ),
    "a sink elsewhere": (
        (OUT, LSE, SINK.to("meta")),
        ArgumentError,
        r"sink is on meta, the call\'s other tensors on cpu: move it with .to\(\'cpu\'\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused(name: str) -> None:
    arguments, error, message = REFUSED[name]
    call: Callable[..., Tensor] = with_sinks
    with pytest.raises(error, match=message):
        call(*arguments)
