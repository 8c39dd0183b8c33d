"""Saved outputs of a compiled call's forward: computed once, where the backend states their size,
and never mixed up with another kernel's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import anyflex
from anyflex.contract.artifacts import Artifacts
from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.call import Call, GradInputs, Grads, Outputs, Saved, TensorSpec
from anyflex.contract.capabilities import Capabilities
from anyflex.contract.decision import Accepted, Decision
from anyflex.contract.spec import Spec
from anyflex.errors import PluginError
from anyflex.reference.backend import ReferenceBackend
from anyflex.registry import isolated, register
from anyflex.runtime.plan import Plan
from anyflex.runtime.saved_for_backward import NOTHING, cut, saved_bytes
from anyflex.testing import posing
from tests.soak import SOAK

__all__: list[str] = []


class Saving(Kernel):
    """Saves lse times a number, which its backward divides by, in two tensors."""

    def __init__(self, inner: Kernel, backend: type[SavingBackend]) -> None:
        self.inner = inner
        self.backend = backend

    def saved_outputs(self, call: Call) -> tuple[TensorSpec, ...]:
        rows = tuple(call.query.shape[:3])
        return (TensorSpec(rows, torch.int8, zeroed=True), TensorSpec(rows, torch.float64))

    def forward(self, call: Call, out: Outputs) -> None:
        self.backend.forwards += 1
        self.inner.forward(call, out)
        if out.saved:
            zeros, scaled = out.saved
            assert out.lse is not None
            assert not zeros.any()
            scaled.copy_(self.backend.times * out.lse)

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        zeros, scaled = saved.extras
        assert not zeros.any()
        self.inner.backward(call, Saved(saved.out, scaled / self.backend.times), grad, grads)


class SavingBackend(Backend):
    capabilities = Capabilities(
        dtypes=frozenset({torch.float64}),
        aux=frozenset({"lse"}),
        gradients=frozenset({"q", "k", "v", "lse"}),
    )
    times: ClassVar[float] = 2.0
    promised: ClassVar[Any] = (0, 9)
    forwards: ClassVar[int] = 0

    def probe(self) -> Decision:
        return Accepted()

    def saved_bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        assert dtype is torch.float64
        return type(self).promised  # type: ignore[no-any-return]

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        reference = ReferenceBackend("reference", "cpu")
        return Saving(reference.compile(spec, artifacts), type(self))


class Passing(TorchDispatchMode):
    """An active dispatch mode sends eager calls through the operations."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        return function(*arguments, **(options or {}))


@pytest.fixture
def backend() -> Iterator[type[SavingBackend]]:
    class Mine(SavingBackend):
        pass

    class Other(SavingBackend):
        times = 3.0
        priority = -1

    torch._dynamo.reset()
    with isolated(reference=ReferenceBackend):
        register("cpu.mine", Mine)
        register("cpu.other", Other)
        yield Mine
    torch._dynamo.reset()


def compiled(**options: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = torch.compile(
        anyflex.flex_attention, backend="aot_eager", fullgraph=True, **options
    )
    return function


def leaves(batch: int = 2, length: int = 12, dim: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(batch + length + dim)
    shape = (batch, 2, length, dim)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    ]


def check(inputs: list[Tensor], out: Tensor) -> None:
    """Compare out and its gradients with the reference's."""
    wanted = anyflex.flex_attention(*inputs, backend="reference")
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    found = torch.autograd.grad((out * weights).sum(), inputs)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        found, torch.autograd.grad((wanted * weights).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [4, 12, 64] if SOAK else [64])
def test_forward_runs_once(backend: type[SavingBackend], length: int) -> None:
    inputs = leaves(length=length)
    check(inputs, compiled()(*inputs))
    assert backend.forwards == 1


def test_forward_runs_once_with_sizes_that_change(backend: type[SavingBackend]) -> None:
    attention = compiled(dynamic=True)
    for batch, length, dim in ((2, 12, 4), (4, 18, 4), (1, 72, 4)):
        inputs = leaves(batch, length, dim)
        check(inputs, attention(*inputs))
    assert backend.forwards == 3


@pytest.mark.parametrize(
    ("promised", "length"),
    [((0, 0), 300), ((0, 1), 300), ((1, 0), 300), ((0, 9), 9)][:: 1 if SOAK else 3],
    ids=str,
)
def test_what_was_not_promised_or_has_no_place_is_computed_again(
    backend: type[SavingBackend], promised: tuple[int, int], length: int
) -> None:
    backend.promised = promised
    inputs = leaves(length=length)
    check(inputs, compiled()(*inputs))
    assert backend.forwards == 2


def test_another_backend_than_was_asked_computes_the_call(backend: type[SavingBackend]) -> None:
    inputs = leaves()
    attention = compiled()
    check(inputs, attention(*inputs))
    with anyflex.use_backend("cpu.other"):
        out = attention(*inputs)
        check(inputs, out)
    with anyflex.use_backend("reference"):
        out = attention(*inputs)
        check(inputs, out)
    assert backend.forwards == 1


@pytest.mark.parametrize("names", [("cpu.other", "cpu.mine"), ("reference", "cpu.mine")], ids=str)
def test_backward_by_another_backend_than_forward_reads_nothing_of_it(
    backend: type[SavingBackend], names: tuple[str, str]
) -> None:
    inputs = leaves()
    attention = compiled()
    attention(*inputs)
    with anyflex.use_backend(names[0]):
        out = attention(*inputs)
    with anyflex.use_backend(names[1]):
        check(inputs, out)
    assert backend.forwards == 2


def test_without_gradients_nothing_is_left(backend: type[SavingBackend]) -> None:
    inputs = leaves()
    with torch.no_grad():
        attention = compiled()
        attention(*inputs)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, given: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(anyflex.flex_attention, backend=keep, fullgraph=True)(*inputs)
    (graph,) = graphs
    (node,) = graph.graph.find_nodes(
        op="call_function", target=torch.ops.anyflex.flex_attention.default
    )
    outputs = torch.ops.anyflex.flex_attention.default(
        *(tensor.detach() for tensor in inputs),
        [torch.tensor(0.5).double()],
        [0, 0],
        node.args[-1],
    )
    assert [tensor.numel() for tensor in outputs[1:]] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "promised",
    [None, (1,), (1, -1), (1.0, 2), [1, 2], (10**30, 0)][:: 1 if SOAK else 2],
    ids=str,
)
def test_a_wrong_promise_is_reported(
    backend: type[SavingBackend], promised: object, caplog: pytest.LogCaptureFixture
) -> None:
    backend.promised = promised
    inputs = leaves()
    with caplog.at_level(logging.WARNING, "anyflex"):
        check(inputs, compiled()(*inputs))
    assert backend.forwards == 2
    assert "plugin 'cpu.mine'" in caplog.text
    assert "saved_bytes(dtype) must return two ints" in caplog.text
    assert "run forward again" in caplog.text


def test_a_strict_registry_raises_for_a_wrong_promise(
    monkeypatch: pytest.MonkeyPatch, backend: type[SavingBackend]
) -> None:
    monkeypatch.setenv("ANYFLEX_STRICT", "1")
    backend.promised = None
    with Passing(), pytest.raises(PluginError, match="saved_bytes"):
        anyflex.flex_attention(*leaves())
    # Dynamo wraps exceptions that are raised while it traces.
    with pytest.raises(RuntimeError, match=r"PluginError: plugin 'cpu.mine' .*saved_bytes"):
        compiled()(*leaves())


def test_a_question_that_a_device_has_no_memory_for_promises_nothing(
    backend: type[SavingBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(self: Backend, dtype: torch.dtype) -> tuple[int, int]:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(backend, "saved_bytes", no_memory)
    inputs = leaves()
    check(inputs, compiled()(*inputs))
    assert backend.forwards == 2


@pytest.mark.parametrize("begin", [1027, *([1024] if SOAK else [])])
def test_a_hook_may_pack_what_is_left_anywhere(backend: type[SavingBackend], begin: int) -> None:
    def pack(tensor: Tensor) -> object:
        if tensor.dtype is not torch.uint8:
            return tensor
        buffer = torch.full((tensor.numel() + 2 * begin,), 77, dtype=torch.uint8)
        place = buffer[begin : begin + tensor.numel()]
        packed.append(place.copy_(tensor))
        return place

    packed: list[Tensor] = []
    inputs = leaves()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda place: place):
        out = compiled()(*inputs)
    check(inputs, out)
    assert len(packed) == 1 and packed[0].storage_offset() == begin
    assert backend.forwards == 1


def test_saved_outputs_that_fail_in_backward_are_the_plugins(
    backend: type[SavingBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = compiled()(*leaves())

    def late(self: Kernel, call: Call) -> tuple[TensorSpec, ...]:
        raise ValueError("late")

    monkeypatch.setattr(Saving, "saved_outputs", late)
    with pytest.raises(PluginError, match="ValueError: late"):
        out.sum().backward()


def test_a_device_that_another_stands_in_for_is_asked() -> None:
    class Mine(SavingBackend):
        pass

    torch._dynamo.reset()
    with isolated(reference=ReferenceBackend), posing("xpu"):
        register("xpu.mine", Mine)
        inputs = leaves()
        out = compiled()(*inputs)
        torch.autograd.grad(out.sum(), inputs)
    assert Mine.forwards == 1
    torch._dynamo.reset()


def test_a_backward_of_its_own_asks_nothing(
    backend: type[SavingBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = (tensor.detach() for tensor in leaves())
    out, lse = anyflex.flex_attention(query, key, value, return_lse=True)
    asked: list[torch.dtype] = []

    def ask(self: Backend, dtype: torch.dtype) -> tuple[int, int]:
        asked.append(dtype)
        return 0, 9

    monkeypatch.setattr(backend, "saved_bytes", ask)
    with Passing():
        anyflex.flex_attention_backward(torch.ones_like(out), query, key, value, out, lse)
    assert not asked
    with Passing():
        anyflex.flex_attention(*leaves())
    assert asked


@pytest.mark.parametrize("answer", [RuntimeError, AssertionError])
def test_nothing_is_promised_for_a_device_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, answer: type[Exception]
) -> None:
    def absent(device: torch.device) -> str:
        raise answer("No CUDA GPUs are available")

    monkeypatch.setattr("anyflex.tensors.tensor_facts.architecture", absent)
    assert saved_bytes(torch.device("cuda"), torch.float16, None) == NOTHING


def test_bytes_that_nothing_is_left_in_are_zero(
    backend: type[SavingBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(plan: Plan, size: int) -> Tensor:
        return torch.full((size,), 7, dtype=torch.uint8, device=plan.device)

    monkeypatch.setattr("anyflex.runtime.launch.allocate_saved_bytes", poisoned)
    saved: list[Tensor] = []

    class Keeping(Passing):
        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), options: Any = None
        ) -> Any:
            outputs = super().__torch_dispatch__(function, types, arguments, options)
            if function is torch.ops.anyflex.flex_attention.default:
                saved.append(outputs[3])
            return outputs

    backend.promised = (0, 1)
    with Keeping():
        anyflex.flex_attention(*leaves())
    assert saved[0].numel() == 2 * 2 * 12 and not saved[0].any()


def test_tensors_lie_one_after_the_other_and_the_rest_is_zero() -> None:
    memory = torch.full((64,), 7, dtype=torch.uint8)
    specs = (TensorSpec((8,), torch.int16), TensorSpec((2, 4), torch.float32, zeroed=True))
    found = cut(memory, specs, new=True)
    assert found is not None
    short, wide = found
    assert [tensor.data_ptr() - memory.data_ptr() for tensor in found] == [0, 16]
    assert (memory[:16] == 7).all()
    assert not memory[16:].any()
    wide.fill_(2.0)
    short.fill_(5)
    again = cut(memory, specs)
    assert again is not None
    assert torch.equal(again[0], torch.full((8,), 5, dtype=torch.int16))
    assert torch.equal(again[1], torch.full((2, 4), 2.0))


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("begin", [0, 16, 8, 3])
def test_memory_is_read_wherever_it_lies(begin: int, step: int) -> None:
    wanted = torch.arange(8.0)
    buffer = torch.full((256,), 77, dtype=torch.uint8)
    memory = buffer[begin : begin + 32 * step : step]
    memory.copy_(wanted.view(torch.uint8))
    found = cut(memory, (TensorSpec((4,), torch.float32), TensorSpec((2, 2), torch.float32)))
    assert found is not None
    assert torch.equal(torch.cat([found[0], found[1].flatten()]), wanted)


def test_what_does_not_fit_is_not_cut() -> None:
    memory = torch.full((64,), 7, dtype=torch.uint8)
    assert cut(memory, (TensorSpec((17,), torch.float32),), new=True) is None
    odd = (TensorSpec((7,), torch.int16), TensorSpec((1,), torch.float32))
    assert cut(memory, odd, new=True) is None
    assert (memory == 7).all()
    assert cut(memory, (), new=True) == ()
    assert not memory.any()


@pytest.mark.parametrize(("length", "forwards"), [(12, 1), *([(13, 2)] if SOAK else [])])
def test_compiled_autograd_takes_what_an_eager_forward_left(
    backend: type[SavingBackend], length: int, forwards: int
) -> None:
    """If one of two tensors would begin between multiples of 16 bytes, forward runs again."""
    inputs = leaves(length=length)
    out = anyflex.flex_attention(*inputs)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        out.sum().backward()
    assert backend.forwards == forwards
    wanted = anyflex.flex_attention(*inputs, backend="reference")
    for tensor, other in zip(inputs, torch.autograd.grad(wanted.sum(), inputs), strict=True):
        torch.testing.assert_close(tensor.grad, other, rtol=1e-12, atol=1e-12)
