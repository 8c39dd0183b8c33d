"""Tensors with torch's negative bit, whose memory holds the negatives of their elements."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.contract.artifacts import Artifacts
from anyflex.plugin import (
    Call,
    GradInputs,
    Grads,
    Kernel,
    Outputs,
    Saved,
    Spec,
    isolated,
    register,
)
from anyflex.reference.backend import ReferenceBackend

NAMES = ("query", "key", "value", "bias", "limit", "dout", "dlse", "delta", "out", "lse")
LEARNED = NAMES[:4]
seen: list[bool] = []


class Watching(ReferenceBackend):
    """The reference, noting whether a tensor has the bit: kernels that read memory miss it."""

    priority = 1000

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        return _Watching(super().compile(spec, artifacts))


class _Watching(Kernel):
    def __init__(self, inner: Kernel) -> None:
        self.inner = inner

    def forward(self, call: Call, out: Outputs) -> None:
        note(call.query, call.key, call.value, *call.captured, out.out, out.lse)
        self.inner.forward(call, out)

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        note(call.query, call.key, call.value, *call.captured, saved.out, saved.lse)
        note(grad.dout, grad.dlse, grad.delta, grads.dq, grads.dk, grads.dv, *grads.captured)
        self.inner.backward(call, saved, grad, grads)


def note(*tensors: Tensor | None) -> None:
    seen.extend(tensor.is_neg() for tensor in tensors if tensor is not None)


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    seen.clear()
    with isolated():
        register("cpu.watching", Watching)
        yield


def drawn(negated: str | None) -> dict[str, Tensor]:
    """One call's tensors; of `negated`, or of "all", the memory holds the negatives."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name in NAMES:
        shape = {"bias": (9,), "limit": (9,), "dlse": (1, 2, 9), "delta": (1, 2, 9)}
        shape["lse"] = (1, 2, 9)
        tensor = torch.randn(shape.get(name, (1, 2, 9, 8)), generator=generator)
        if negated in (name, "all"):
            tensor = torch._neg_view(-tensor)
            assert tensor.is_neg()
        tensors[name] = tensor.requires_grad_(name in LEARNED)
    return tensors


def attended(given: dict[str, Tensor], compiler: str = "") -> tuple[Tensor, ...]:
    """out, lse, and the gradients of everything that learns."""
    bias, limit = given["bias"], given["limit"]
    mask = anyflex.create_block_mask(lambda b, h, i, j: limit[j] > -0.5, None, None, 9, 9)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = anyflex.flex_attention(
            query,
            key,
            value,
            lambda score, b, h, i, j: score + bias[j],
            mask,
            return_aux=anyflex.AuxRequest(lse=True),
        )
        return out, aux.lse

    if compiler:
        attention = torch.compile(attention, fullgraph=True, backend=compiler)
    results = attention(given["query"], given["key"], given["value"])
    arriving = given["dout"], given["dlse"]
    return *results, *torch.autograd.grad(results, [given[name] for name in LEARNED], arriving)


@pytest.mark.parametrize("negated", [*NAMES[:7], "all"])
def test_kernels_see_tensors_whose_memory_holds_their_elements(negated: str) -> None:
    wanted = attended(drawn(None))
    for found, expected in zip(attended(drawn(negated)), wanted, strict=True):
        assert torch.equal(found, expected)
    assert seen and not any(seen)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_models_too(compiler: str) -> None:
    wanted = attended(drawn(None))
    for found, expected in zip(attended(drawn("all"), compiler), wanted, strict=True):
        assert torch.equal(found, expected)
    assert seen and not any(seen)


@pytest.mark.parametrize("negated", [*NAMES, "all"])
def test_gradients_of_a_softmax_that_was_completed_elsewhere(negated: str) -> None:
    def gradients(given: dict[str, Tensor]) -> anyflex.AttentionGradients:
        bias = given["bias"]
        own = {name: given[name] for name in NAMES if name not in ("bias", "limit")}
        found = anyflex.flex_attention_backward(
            **own, score_mod=lambda score, b, h, i, j: score + bias[j]
        )
        # The user's own tensor stands beside its gradient, not the copy that was read.
        ((tensor, _),) = found.captured
        assert tensor is bias
        return found

    found, wanted = gradients(drawn(negated)), gradients(drawn(None))
    for name in ("query", "key", "value"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))
    assert torch.equal(found.captured[0][1], wanted.captured[0][1])
    assert seen and not any(seen)


@pytest.mark.filterwarnings("ignore::anyflex.PerformanceWarning")
def test_what_an_untraced_mod_reads_gets_its_gradient() -> None:
    def gradient(negated: str | None) -> Tensor:
        given = drawn(negated)
        bias = given["bias"]

        def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + torch.special.i0(bias[j]).log()

        inputs = given["query"], given["key"], given["value"]
        out = anyflex.flex_attention(*inputs, mod, backend="reference")
        return torch.autograd.grad(out, bias, given["dout"])[0]

    assert torch.allclose(gradient("all"), gradient(None))
