"""Compiled autograd: the backward of an eager forward, and of a compiled one, in one graph."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

import anyflex
from tests.compile.graphs import CountingBackend
from tests.soak import SOAK

__all__: list[str] = []

COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++")
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=COMPILER)]
DOCUMENTS = torch.arange(40) // 15


def block_mask(mask_mod: Callable[..., Any]) -> anyflex.BlockMask:
    return anyflex.create_block_mask(mask_mod, None, None, 40, 40, BLOCK_SIZE=16)


MASKS = {
    "none": None,
    "causal": block_mask(lambda b, h, q, k: q >= k),
    "captured": block_mask(lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k]),
}


def leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """query, key and value, as a projection leaves them, and what a score mod captures."""
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn((2, 40, 2, 8), generator=generator, dtype=dtype) for _ in "qkv"]
    tensors = [tensor.transpose(1, 2) for tensor in tensors]
    return [tensor.requires_grad_() for tensor in (*tensors, torch.randn(2, generator=generator))]


def loss_of(inputs: list[Tensor], mask: Any, scored: bool, lse: bool, slope: float) -> Tensor:
    *tensors, bias = inputs
    shift = round(10 * slope)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + slope * bias[h] * (q - k + shift)

    request = anyflex.AuxRequest(lse=lse, max_scores=True)
    out, aux = anyflex.flex_attention(
        *tensors, score if scored else None, mask, return_aux=request
    )
    return out.square().sum() + (aux.lse.sin().sum() if lse else 0.0)


@pytest.mark.parametrize("backend", BACKENDS if SOAK else ["aot_eager"])
def test_the_backward_of_eager_calls_is_one_graph(backend: str) -> None:
    calls = {
        f"mask {name}, scored {scored}, lse {lse}": (mask, scored, lse, 0.1)
        for name, mask in MASKS.items()
        for scored in (False, True)
        for lse in (False, True)
    }
    calls = dict(list(calls.items())[:: -1 if SOAK else -5])
    compiler = torch.compile(backend=backend, fullgraph=True)
    found, wanted = (
        {name: (inputs := leaves(), loss_of(inputs, *call)) for name, call in calls.items()}
        for _ in range(2)
    )
    torch.stack([loss for _, loss in wanted.values()]).sum().backward()
    total = torch.stack([loss for _, loss in found.values()]).sum()
    with compiled_autograd._enable(compiler):
        total.backward()
    for name, (inputs, _) in found.items():
        for tensor, other in zip(inputs, wanted[name][0], strict=True):
            assert (tensor.grad is None) == (other.grad is None), name
            if tensor.grad is not None and other.grad is not None:
                error = (tensor.grad - other.grad).abs() - 1e-5 * other.grad.abs()
                assert error.max() <= 1e-6, name


def test_new_numbers_make_no_new_graph_for_ever() -> None:
    counting = CountingBackend()
    compiler = torch.compile(backend=counting, fullgraph=True)
    graphs = []
    for slope in (0.1, 0.2, 0.3):
        found, wanted = leaves(), leaves()
        loss_of(wanted, MASKS["causal"], True, False, slope).backward()
        loss = loss_of(found, MASKS["causal"], True, False, slope)
        with compiled_autograd._enable(compiler):
            loss.backward()
        for tensor, other in zip(found, wanted, strict=True):
            assert torch.equal(tensor.grad, other.grad)  # type: ignore[arg-type]
        graphs.append(counting.graphs)
    assert graphs == [1, 2, 2]


@pytest.mark.parametrize("backend", BACKENDS if SOAK else ["aot_eager"])
def test_the_backward_of_a_compiled_call_is_one_graph(backend: str) -> None:
    found, wanted = leaves(), leaves()
    call = MASKS["captured"], True, True, 0.1
    loss_of(wanted, *call).backward()
    loss = torch.compile(loss_of, backend=backend, fullgraph=True)(found, *call)
    with compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
        loss.backward()
    for tensor, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_torchs_setting_takes_the_backward_along() -> None:
    found, wanted = leaves(), leaves()
    call = MASKS["captured"], True, True, 0.1
    loss_of(wanted, *call).backward()
    counters = torch._dynamo.utils.counters["compiled_autograd"]
    counters.clear()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss_of(found, *call).backward(), backend="aot_eager")()
    assert counters["captures"] == 1
    for tensor, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad, rtol=1e-5, atol=1e-6)


def opaque_loss(inputs: list[Tensor]) -> Tensor:
    *tensors, bias = inputs

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + torch.special.bessel_j0((q - k).float()) * bias[h]

    out = anyflex.flex_attention(*tensors, score)
    assert isinstance(out, Tensor)
    return out.square().sum()


@pytest.mark.filterwarnings("ignore::anyflex.PerformanceWarning")
def test_a_mod_that_is_no_graph_breaks_the_graph() -> None:
    found, wanted = leaves(), leaves()
    opaque_loss(wanted).backward()
    loss = opaque_loss(found)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    for tensor, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad)


@pytest.mark.filterwarnings("ignore::anyflex.PerformanceWarning")
def test_a_full_graph_of_a_mod_that_is_none_says_why_not() -> None:
    loss = opaque_loss(leaves())
    compiler = torch.compile(backend="eager", fullgraph=True)
    with (
        compiled_autograd._enable(compiler),
        pytest.raises(torch._dynamo.exc.Unsupported, match="score_mod or block_mask's mask_mod"),
    ):
        loss.backward()
