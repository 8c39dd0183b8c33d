"""The registry seen from `anyflex.flex_attention`."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.contract.call import Call, GradInputs, Grads, Outputs, Saved
from anyflex.contract.decision import Accepted, Decision
from anyflex.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendRefused,
    PerformanceWarning,
    PluginError,
)
from anyflex.registry import isolated, register, register_hooks
from anyflex.registry.hook_specs import hookimpl
from anyflex.runtime import plan
from tests.registry.stubs import EVERYTHING, NullKernel, Stub, make_stub

__all__: list[str] = []


@pytest.fixture(autouse=True)
def with_the_reference(registry: None) -> Any:
    """The real reference instead of the stub."""
    with isolated():
        yield


def qkv(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(  # type: ignore[return-value]
        torch.randn(1, 2, 8, 16, generator=generator, **options).requires_grad_() for _ in range(3)
    )


class Raising(NullKernel):
    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        raise RuntimeError("illegal address\nin a kernel")


class Sevens(NullKernel):
    def forward(self, call: Call, out: Outputs) -> None:
        out.out.fill_(7.0)

    def describe(self, call: Call) -> str:
        return "sevens"


def sevens(**options: Any) -> Any:
    return make_stub(answers={"compile": Sevens()}, **options)


def test_the_chosen_backend_computes() -> None:
    register("cpu", sevens())
    out = anyflex.flex_attention(*qkv())
    assert torch.equal(out, torch.full_like(out, 7.0))


def test_a_backend_registered_later_is_asked_by_the_same_call() -> None:
    call = qkv()
    before = anyflex.flex_attention(*call)
    register("cpu", sevens())
    assert not torch.equal(anyflex.flex_attention(*call), before)
    with anyflex.use_backend("reference"):
        assert torch.equal(anyflex.flex_attention(*call), before)
    assert torch.equal(anyflex.flex_attention(*call, backend="reference"), before)


def test_core_computes_the_gradients_of_a_forward_only_backend() -> None:
    class ForwardOnly(make_stub()):  # type: ignore[misc]
        def supports(self, spec: Any) -> Decision:
            return Accepted(backward="core")

        def compile(self, spec: Any, artifacts: Any) -> Any:
            return Dense()

    class Dense(NullKernel):
        def forward(self, call: Call, out: Outputs) -> None:
            scores = call.query @ call.key.transpose(-1, -2) * call.scale
            out.out.copy_(scores.softmax(-1) @ call.value)
            if out.lse is not None:
                out.lse.copy_(scores.logsumexp(-1))

    register("cpu", ForwardOnly)
    ours, theirs = qkv(), qkv()
    weight = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(5))
    (anyflex.flex_attention(*ours) * weight).sum().backward()
    (torch.nn.functional.scaled_dot_product_attention(*theirs) * weight).sum().backward()
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.grad, their.grad, atol=1e-5, rtol=1e-5)


def test_a_backward_that_raises_is_named() -> None:
    register("cpu.raising", make_stub(answers={"compile": Raising()}))
    out = anyflex.flex_attention(*qkv())
    with pytest.raises(PluginError, match="'cpu.raising'.*raised RuntimeError: illegal address"):
        out.sum().backward()
    torch.testing.assert_close(
        anyflex.flex_attention(*qkv(), backend="reference"),
        torch.nn.functional.scaled_dot_product_attention(*qkv()),
    )


class Returning(NullKernel):
    """Computes into tensors of its own, as a user of torch would."""

    def forward(self, call: Call, out: Outputs) -> None:
        return torch.zeros_like(out.out)  # type: ignore[return-value]


class ReturningGradients(NullKernel):
    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        return grads.dq  # type: ignore[return-value]


def test_what_a_kernel_returns_instead_of_filling_outputs_is_an_error() -> None:
    register("cpu.forward", make_stub(answers={"compile": Returning()}))
    with pytest.raises(PluginError, match=r"'cpu.forward'.*forward\(\) returned a Tensor: it"):
        anyflex.flex_attention(*qkv(), backend="cpu.forward")
    register("cpu.backward", make_stub(answers={"compile": ReturningGradients()}))
    out = anyflex.flex_attention(*qkv(), backend="cpu.backward")
    with pytest.raises(PluginError, match=r"'cpu.backward'.* backward\(\) returned a Tensor"):
        out.sum().backward()


@pytest.mark.parametrize("method", ["probe", "supports"])
def test_an_acceptance_says_whose_the_backward_is_or_can_not_be_made(method: str) -> None:
    def accept(*_: Any) -> Decision:
        return Accepted(backward="Core")  # type: ignore[arg-type]

    register("cpu.typo", type("Typo", (make_stub(),), {method: accept}))
    with pytest.raises(PluginError, match="'cpu.typo'.*must be 'own' or 'core', got 'Core'"):
        anyflex.flex_attention(*qkv(), backend="cpu.typo")


def test_a_listener_hears_of_every_launch() -> None:
    heard: list[tuple[str, str]] = []
    register("cpu", sevens())
    call = tuple(tensor.detach() for tensor in qkv())
    anyflex.flex_attention(*call)
    listener = hookimpl(lambda backend, variant: heard.append((backend, variant)))
    register_hooks(types.SimpleNamespace(anyflex_launched=listener), "listener")
    anyflex.flex_attention(*call)
    anyflex.flex_attention(*call, backend="reference")
    assert heard[0] == ("cpu", "sevens")
    assert heard[1][0] == "reference"
    heard.clear()
    anyflex.flex_attention(*qkv(), backend="reference").sum().backward()
    assert [backend for backend, _ in heard] == ["reference", "reference"]  # and its backward


def test_sixteen_threads_make_the_first_call_together() -> None:
    stub = sevens(compile_seconds=0.1)
    register("cpu", stub)
    barrier = threading.Barrier(16)
    results: list[Tensor] = []

    def work() -> None:
        call = tuple(tensor.detach() for tensor in qkv())
        barrier.wait()
        results.append(anyflex.flex_attention(*call))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 16 and all(bool((out == 7).all()) for out in results)
    assert len(stub.compiled) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"backend": "cudaa"}, ArgumentError, "'cudaa'; did you mean 'cuda'"),
        ({"backend": "cuda"}, BackendRefused, "computes on cuda tensors.*are on cpu"),
        ({"backend": 3}, ArgumentTypeError, "backend"),
        ({"kernel_options": {"BLOK_M": 64}}, ArgumentError, "nearest is 'BLOCK_M'"),
        ({"kernel_options": {"BLOCK_M": 48}}, ArgumentError, "power of two"),
        ({"kernel_options": {"BACKEND": "X"}}, ArgumentError, "backend="),
        ({"kernel_options": [1]}, ArgumentTypeError, "dict"),
    ],
)
def test_misuse_is_a_typed_error(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        anyflex.flex_attention(*qkv(), **arguments)


def test_an_option_of_a_wrong_type_is_refused_after_a_right_one_too() -> None:
    with pytest.warns(PerformanceWarning, match="num_stages"):
        anyflex.flex_attention(*qkv(), kernel_options={"num_stages": 1})
    with pytest.raises(ArgumentTypeError, match="num_stages.*True"):
        anyflex.flex_attention(*qkv(), kernel_options={"num_stages": True})


NOT_REPEATABLE = dataclasses.replace(EVERYTHING, deterministic=False)


@pytest.fixture
def deterministic() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def test_a_backend_without_repeatable_gradients_refuses_them(deterministic: None) -> None:
    class Own(Stub):
        capabilities = NOT_REPEATABLE

    register("cpu", Own)
    torch.use_deterministic_algorithms(True)
    with pytest.raises(BackendRefused, match="repeat bit for bit .* not supported"):
        anyflex.flex_attention(*qkv(), backend="cpu")
    without_gradients = (tensor.detach() for tensor in qkv())
    anyflex.flex_attention(*without_gradients, backend="cpu")


def test_warn_only_lets_it_compute_and_warns_once(deterministic: None) -> None:
    class Own(Stub):
        capabilities = NOT_REPEATABLE

    register("cpu", Own)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="backend cpu has no gradients that repeat") as caught:
        anyflex.flex_attention(*qkv())
        anyflex.flex_attention(*qkv(), return_lse=True)
    assert len(caught) == 1


def test_a_warning_points_at_the_line_of_the_caller() -> None:
    register("cpu", make_stub(refuses="not today"))
    with pytest.warns(PerformanceWarning, match="not today") as caught:
        anyflex.flex_attention(*qkv())
    assert caught[0].filename == __file__


def test_a_kernel_runs_on_its_tensors_device_whichever_is_selected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tensors' device is reported as cuda:1."""
    selected = [0]
    seen: list[str] = []

    @contextlib.contextmanager
    def select(device: torch.device) -> Iterator[None]:
        before, selected[0] = selected[0], device.index
        seen.append(f"selected {device.index}")
        yield
        selected[0] = before

    class Noting(NullKernel):
        def forward(self, call: Call, out: Outputs) -> None:
            seen.append(f"forward on {selected[0]}")
            out.out.zero_()

        def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
            seen.append(f"backward on {selected[0]}")

    guard = plan._device_guard
    monkeypatch.setattr(plan, "_device_guard", lambda _: guard(torch.device("cuda", 1)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: selected[0])
    monkeypatch.setattr(torch.cuda, "device", select)
    register("cpu", make_stub(answers={"compile": Noting()}))
    query, key, value = qkv()
    for device in (0, 1, 0):
        selected[0] = device
        anyflex.flex_attention(query, key, value).sum().backward()
        assert selected == [device]
    apart = ["selected 1", "forward on 1", "selected 1", "backward on 1"]
    assert seen == [*apart, "forward on 1", "backward on 1", *apart]


def test_a_device_module_that_cannot_say_which_is_selected_selects_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.SimpleNamespace(device=lambda device: f"selects {device}")
    monkeypatch.setattr(torch, "mine", module, raising=False)
    guard = plan._device_guard(types.SimpleNamespace(type="mine", index=0))  # type: ignore[arg-type]
    assert guard is not None and str(guard()).startswith("selects ")
