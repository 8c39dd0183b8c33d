"""Allocations without memory: an AllocationError names the purpose and the number of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.cli.exit_codes import ExitCode, code_of
from anyflex.plugin import (
    Accepted,
    AllocationError,
    Artifacts,
    Backend,
    Call,
    Capabilities,
    Decision,
    GradInputs,
    Grads,
    Kernel,
    Outputs,
    PluginError,
    Saved,
    Spec,
    TensorSpec,
    isolated,
    register,
)
from anyflex.runtime import launch

TOO_MUCH = 2**55
ROWS = 2**50


class Hungry(Kernel):
    """Asks for what `Hungry.asks` says, and allocates it by itself for "kernel"."""

    asks = ""

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        return (TensorSpec((TOO_MUCH,), torch.uint8),) if direction in self.asks else ()

    def saved_outputs(self, call: Call) -> tuple[TensorSpec, ...]:
        size = TOO_MUCH // 4 if self.asks == "saved" else 1
        return (TensorSpec((size,), torch.float32),)

    def forward(self, call: Call, out: Outputs) -> None:
        if self.asks == "kernel":
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        if self.asks == "bug":
            raise RuntimeError("value cannot be converted to type int without overflow")
        out.out.zero_()
        if out.lse is not None:
            out.lse.zero_()

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        for each in (grads.dq, grads.dk, grads.dv):
            if each is not None:
                each.zero_()


class HungryBackend(Backend):
    priority = -1
    capabilities = Capabilities(dtypes=frozenset({torch.float32}))

    def probe(self) -> Decision:
        return Accepted()

    def supports(self, spec: Spec) -> Decision:
        return Accepted()

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        return Hungry()


@pytest.fixture(autouse=True)
def hungry() -> Iterator[None]:
    with isolated():
        register("cpu.hungry", HungryBackend)
        yield


def attend(monkeypatch: pytest.MonkeyPatch, asks: str) -> None:
    monkeypatch.setattr(Hungry, "asks", asks)
    query, key, value = (torch.randn(1, 1, 8, 8, requires_grad=True) for _ in range(3))
    anyflex.flex_attention(query, key, value, backend="cpu.hungry").sum().backward()


def wide(rows: int) -> Tensor:
    return torch.randn(1, 1, 1, 8).expand(1, 1, rows, 8)


@pytest.mark.parametrize("rows", [ROWS, 2**59], ids=["no memory", "no int64"])
def test_outputs_that_fit_nowhere(rows: int) -> None:
    key = torch.randn(1, 1, 8, 8)
    aux = anyflex.AuxRequest(lse=True, max_scores=True)
    said = "^backend 'reference' ran out of memory computing cpu float32 E=8"
    with pytest.raises(AllocationError, match=said) as caught:
        anyflex.flex_attention(wide(rows), key, key, return_aux=aux, backend="reference")
    assert isinstance(caught.value, MemoryError) and isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "Make the call smaller" in str(caught.value)


def test_outputs_that_fit_nowhere_in_a_compiled_model() -> None:
    key = torch.randn(1, 1, 8, 8)
    compiled = torch.compile(anyflex.flex_attention, backend="eager", fullgraph=True)
    with pytest.raises(AllocationError, match=f"computing .* {ROWS * 32} bytes"):
        compiled(wide(ROWS), key, key, backend="reference")


def test_a_dense_mask_that_fits_nowhere() -> None:
    with pytest.raises(AllocationError, match=rf"the mask \[1, 1, {2**30}, {2**30}\]: {2**60} "):
        anyflex.create_mask(anyflex.masks.causal(), 1, 1, 2**30, 2**30)


def test_gradients_that_fit_nowhere() -> None:
    query = torch.randn(1, 1, 8, 8)
    table = torch.zeros(1, requires_grad=True).expand(ROWS)
    out = anyflex.flex_attention(
        query, query, query, lambda s, b, h, q, k: s + table[k], backend="reference"
    )
    said = rf"computing cpu float32.*: {ROWS * 4} bytes \(4 PiB\)"
    with pytest.raises(AllocationError, match=said):
        out.sum().backward()


@pytest.mark.parametrize("asks", ["forward", "backward", "saved", "kernel"])
def test_what_a_kernel_asks_for_is_no_fault_of_the_plugin(
    monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    said = rf"^backend 'cpu.hungry' ran out of memory computing cpu float32.*: {TOO_MUCH} bytes"
    with pytest.raises(AllocationError, match=said) as caught:
        attend(monkeypatch, asks)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert code_of(caught.value) is ExitCode.NOT_RUN


def test_other_errors_of_a_kernel_stay_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match="without overflow"):
        attend(monkeypatch, "bug")


def test_an_accelerator_out_of_memory_for_what_forward_keeps_says_so_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def empty(*size: object, **options: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    spec = Spec("cuda", "", torch.float32, 8, 8)
    compiled = SimpleNamespace(backend=SimpleNamespace(name="cuda"), spec=spec)
    plan: Any = SimpleNamespace(device=torch.device("cpu"), compiled=compiled)
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory$"):
        launch.allocate_saved_bytes(plan, 4)


def test_what_raises_where_outputs_are_made_is_not_blamed_on_the_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def empty_like(*given: object, **options: object) -> Tensor:
        raise RuntimeError("of a mode that the user has set")

    query = torch.randn(1, 1, 8, 8, requires_grad=True)
    out = anyflex.flex_attention(query, query, query, backend="cpu.hungry")
    monkeypatch.setattr(torch, "empty_like", empty_like)
    with pytest.raises(RuntimeError, match="^of a mode that the user has set$"):
        anyflex.flex_attention(query, query, query, backend="cpu.hungry")
    with pytest.raises(RuntimeError, match="^of a mode that the user has set$"):
        out.backward(torch.ones(1, 1, 8, 8))
