"""Dropout in compiled and exported programs: a seed is drawn at each run."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

import anyflex
from tests.compile.graphs import CountingBackend

__all__: list[str] = []

COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    query, key, value = (
        torch.randn((1, 2, 24, 4), generator=generator).requires_grad_() for _ in "qkv"
    )
    return query, key, value


def attend(query: Tensor, key: Tensor, value: Tensor, p: float = 0.3) -> Tensor:
    out: Tensor = anyflex.flex_attention(query, key, value, dropout_p=p, backend="reference")
    return out


def check_backward(out: Tensor, value: Tensor) -> None:
    """Out is linear in value, through the weights that forward kept."""
    weight = torch.randn(out.shape)
    (gradient,) = torch.autograd.grad((out * weight).sum(), value)
    torch.testing.assert_close((gradient * value).sum(), (weight * out).sum())


def test_each_run_draws_a_seed_and_compiles_nothing() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=(counter := CountingBackend()), fullgraph=True)
    tensors = inputs()
    torch.manual_seed(3)
    first, second = compiled(*tensors), compiled(*tensors)
    torch.manual_seed(3)
    assert torch.equal(compiled(*tensors), first)
    assert not torch.equal(first, second)
    check_backward(second, tensors[2])
    torch.manual_seed(3)
    assert torch.equal(attend(*tensors), first)
    assert counter.graphs == 1
    for p in (0.1, 0.2, 0.4):
        torch.manual_seed(4)
        out = compiled(*tensors, p)
        torch.manual_seed(4)
        assert torch.equal(attend(*tensors, p), out)
    assert counter.graphs <= 3


@COMPILER
def test_inductor_draws_at_each_run_too() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True)
    tensors = inputs()
    torch.manual_seed(3)
    first, second = compiled(*tensors), compiled(*tensors)
    torch.manual_seed(3)
    assert torch.equal(compiled(*tensors), first)
    assert not torch.equal(first, second)
    check_backward(second, tensors[2])


def test_a_compiled_checkpoint_repeats_the_dropped_pairs() -> None:
    torch._dynamo.reset()

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out: Tensor = checkpoint(attend, query, key, value, use_reentrant=False)
        return out * 1.0

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    tensors = inputs()
    check_backward(compiled(*tensors), tensors[2])


def test_an_exported_program_draws_at_each_run() -> None:
    class Layer(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attend(query, key, value)

    query, key, value = (tensor.detach() for tensor in inputs())
    program = torch.export.export(Layer(), (query, key, value)).module()
    torch.manual_seed(3)
    first, second = program(query, key, value), program(query, key, value)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(attend(query, key, value), first)


def test_the_backward_of_eager_calls_in_one_graph_has_their_seeds() -> None:
    torch._dynamo.reset()
    tensors = inputs()
    counter = CountingBackend()
    for _ in range(4):
        out = attend(*tensors)
        weight = torch.randn(out.shape)
        loss = (out * weight).sum()
        with compiled_autograd._enable(torch.compile(backend=counter, fullgraph=True)):
            loss.backward()
        value = tensors[2]
        assert value.grad is not None
        torch.testing.assert_close((value.grad * value).sum(), (weight * out).sum())
        for tensor in tensors:
            tensor.grad = None
    assert counter.graphs <= 2
