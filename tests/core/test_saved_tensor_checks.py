"""Saved tensors that backward finds changed: hooks on saved tensors and assignment to .data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import anyflex
from anyflex.contract.artifacts import Artifacts
from anyflex.contract.backend import Backend, Kernel
from anyflex.contract.call import Call, GradInputs, Grads, Outputs, Saved, TensorSpec
from anyflex.contract.decision import Accepted, Decision
from anyflex.contract.spec import Spec
from anyflex.errors import ArgumentError, ArgumentTypeError, BlockMaskError
from anyflex.frontend import custom_ops
from anyflex.reference.backend import ReferenceBackend
from anyflex.registry import isolated, register
from anyflex.runtime.op_request import Request
from anyflex.runtime.saved_for_backward import NOTHING
from tests.soak import SOAK

__all__: list[str] = []

CURE = "a hook on saved tensors must give back what it was given"


class Keeping(Kernel):
    """The reference, which leaves two tensors and remembers what backward gets."""

    def __init__(self, inner: Kernel) -> None:
        self.inner = inner

    def saved_outputs(self, call: Call) -> tuple[TensorSpec, ...]:
        return TensorSpec((6, 8), torch.float32), TensorSpec((5,), torch.int32)

    def forward(self, call: Call, out: Outputs) -> None:
        for position, tensor in enumerate(out.saved):
            tensor.fill_(position)
        self.inner.forward(call, out)

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        KeepingBackend.found.append((call, saved))
        self.inner.backward(call, saved, grad, grads)


class KeepingBackend(Backend):
    capabilities = ReferenceBackend.capabilities
    found: ClassVar[list[tuple[Call, Saved]]] = []

    def probe(self) -> Decision:
        return Accepted()

    def supports(self, spec: Spec) -> Decision:
        return Accepted()

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        return Keeping(ReferenceBackend("reference", "cpu").compile(spec, artifacts))


@pytest.fixture(autouse=True)
def backend() -> Iterator[type[KeepingBackend]]:
    KeepingBackend.found.clear()
    torch._dynamo.reset()
    with isolated(reference=ReferenceBackend):
        register("cpu.keeping", KeepingBackend)
        yield KeepingBackend
    torch._dynamo.reset()


SLOPES = torch.tensor([0.5, 0.25], requires_grad=True)
# All shapes and dtypes differ, so that a hook tells the tensors apart.
NAMES = {
    "query": (1, 2, 6, 4),
    "key": (1, 1, 9, 4),
    "value": (1, 1, 9, 8),
    "out": (1, 2, 6, 8),
    "lse": (1, 2, 6),
    "captured tensor 'SLOPES'": (2,),
    "tensor 0 of those that the kernel keeps for backward": (6, 8),
    "tensor 1 of those that the kernel keeps for backward": (5,),
}


def alibi(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + SLOPES[h] * (k - q)


def leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(NAMES[name], generator=generator, requires_grad=True)
        for name in ("query", "key", "value")
    ]


def attend(*inputs: Tensor, **more: Any) -> Tensor:
    more = {"backend": "cpu.keeping", "enable_gqa": True, **more}
    return anyflex.flex_attention(*inputs, alibi, **more)


def hooked(
    change: Callable[[Tensor], Tensor],
    name: str = "",
    call: Callable[..., Tensor] = attend,
) -> tuple[Tensor, list[Tensor]]:
    """A call whose saved tensor, or all of them, a hook changes."""

    def pack(tensor: Tensor) -> Tensor:
        return change(tensor) if not name or tensor.shape == NAMES[name] else tensor

    inputs = leaves()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        return call(*inputs), inputs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("change", "error", "wanted"),
    [
        (
            lambda t: t.to(torch.float16),
            ArgumentTypeError,
            r"have dtype torch\.(float|int)32, got",
        ),
        (
            lambda t: t.to(torch.float64),
            ArgumentTypeError,
            r"have dtype torch\.(float|int)32, got",
        ),
        (lambda t: t[..., :-1], ArgumentError, r"have shape \["),
        (lambda t: t[None], ArgumentError, r"have shape \["),
        (lambda t: t.to("meta"), ArgumentError, "be on cpu, got meta"),
        (lambda t: t.to_sparse(), ArgumentError, "be dense"),
    ],
    ids=["half", "double", "shorter", "one dimension more", "meta", "sparse"],
)
def test_another_tensor_than_was_saved_reaches_no_kernel(
    name: str, change: Callable[[Tensor], Tensor], error: type[Exception], wanted: str
) -> None:
    out, _ = hooked(change, name)
    with pytest.raises(error, match=f"^{re.escape(name)} must {wanted}.*{CURE}"):
        out.sum().backward()
    assert not KeepingBackend.found


def test_a_parameter_converted_between_forward_and_backward_reaches_no_kernel() -> None:
    inputs = leaves()
    out = attend(*inputs)
    inputs[1].data = inputs[1].data.half()
    with pytest.raises(ArgumentTypeError, match="^key must have dtype .* and .data must not be"):
        out.sum().backward()
    assert not KeepingBackend.found


def transposed(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.dim() < 2 else tensor.mT.contiguous().mT


def moved(tensor: Tensor) -> Tensor:
    """Elsewhere in a larger buffer, at an address that is no multiple of 16."""
    buffer = tensor.new_zeros(tensor.numel() + 1)
    return buffer[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("change", [torch.clone, transposed, moved])
def test_what_a_hook_lays_out_anew_reaches_the_kernel_as_it_was_saved(
    change: Callable[[Tensor], Tensor],
) -> None:
    inputs = leaves()
    wanted = torch.autograd.grad(attend(*inputs).square().sum(), [*inputs, SLOPES])
    out, inputs = hooked(lambda tensor: change(tensor.detach()))
    found = torch.autograd.grad(out.square().sum(), [*inputs, SLOPES])
    torch.testing.assert_close(found, wanted)
    call, saved = KeepingBackend.found[-1]
    given = (call.query, call.key, call.value, saved.out, saved.lse, *call.captured)
    for tensor in (*given, *saved.extras):
        assert tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
    for position, tensor in enumerate(saved.extras):
        assert (tensor == position).all()


def shrunk(size: int) -> Callable[[Tensor], Tensor]:
    """Make a tensor whose storage, of `size` bytes, is smaller than its shape."""

    def change(tensor: Tensor) -> Tensor:
        made = tensor.detach().clone()
        made.untyped_storage().resize_(size)
        return made

    return change


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "change",
    [shrunk(0), shrunk(4), lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype)],
    ids=["freed", "smaller", "zero tensor"],
)
def test_a_tensor_outside_of_its_memory_reaches_no_kernel(
    name: str, change: Callable[[Tensor], Tensor]
) -> None:
    out, _ = hooked(change, name)
    with pytest.raises(ArgumentError, match=f"^{re.escape(name)} (of shape|is a Tensor without)"):
        out.sum().backward()
    assert not KeepingBackend.found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, 4])
def test_nor_does_one_of_a_call_whose_query_is_not_contiguous(name: str, size: int) -> None:
    given = leaves()
    names = iter(NAMES)  # in the order in which they are saved

    def pack(tensor: Tensor) -> Tensor:
        return shrunk(size)(tensor) if next(names) == name else tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attend(given[0].mT.contiguous().mT, *given[1:])
    with pytest.raises(ArgumentError, match=f"^{re.escape(name)} of shape .* needs a storage of"):
        out.sum().backward()
    assert not KeepingBackend.found


@pytest.mark.parametrize("name", NAMES)
def test_the_negative_bit_reaches_no_kernel(name: str) -> None:
    """Equal for every operation of torch's, and other numbers in memory."""
    inputs = leaves()
    wanted = torch.autograd.grad(attend(*inputs).square().sum(), [*inputs, SLOPES])
    out, inputs = hooked(lambda tensor: torch._neg_view((-tensor.detach()).clone()), name)
    found = torch.autograd.grad(out.square().sum(), [*inputs, SLOPES])
    torch.testing.assert_close(found, wanted)
    call, saved = KeepingBackend.found[-1]
    given = (call.query, call.key, call.value, saved.out, saved.lse, *call.captured)
    for tensor in (*given, *saved.extras):
        assert not tensor.is_neg()


@pytest.mark.parametrize("name", NAMES)
def test_a_nested_tensor_is_refused(name: str) -> None:
    out, _ = hooked(lambda tensor: torch.nested.nested_tensor([tensor.detach()]), name)
    with pytest.raises(ArgumentError, match=f"^{re.escape(name)} must be one dense tensor"):
        out.sum().backward()
    assert not KeepingBackend.found


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", NAMES)
def test_a_fake_tensor_is_refused_without_being_asked_for_its_address(name: str) -> None:
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    out, _ = hooked(lambda tensor: mode.from_tensor(tensor.detach()), name)
    with pytest.raises(ArgumentError, match=f"^{re.escape(name)} is a FakeTensor"):
        out.sum().backward()
    assert not KeepingBackend.found


@pytest.mark.parametrize("kind", ["strided query", "expanded", "odd", "negative"])
def test_a_tensor_that_no_hook_changes_is_not_copied(kind: str) -> None:
    inputs = leaves()
    slopes = {
        "expanded": torch.rand(1).expand(2),
        "odd": torch.rand(3)[1:],
        "negative": torch._neg_view(torch.rand(2)),
    }.get(kind, torch.rand(2))
    if kind == "strided query":
        inputs[0] = inputs[0].detach().mT.contiguous().mT.requires_grad_()

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + slopes[h]

    out = anyflex.flex_attention(*inputs, mod, enable_gqa=True, backend="cpu.keeping")
    torch.autograd.grad(out.sum(), inputs)
    call, _ = KeepingBackend.found[-1]
    assert [t.data_ptr() for t in (call.query, call.key, call.value)] == [
        t.data_ptr() for t in inputs
    ]
    # A negative one was copied before it was saved.
    assert (call.captured[0].data_ptr() == slopes.data_ptr()) is (kind != "negative")


def test_an_expanded_tensor_that_a_hook_makes_whole_is_expanded_again() -> None:
    query = torch.randn(1, 1, 6, 4).expand(2, 3, 6, 4).requires_grad_()
    with saved_tensors_hooks(lambda tensor: tensor.contiguous(), lambda tensor: tensor):
        out = anyflex.flex_attention(query, query, query, backend="cpu.keeping")
    (found,) = torch.autograd.grad(out.square().sum(), query)
    call, _ = KeepingBackend.found[-1]
    assert call.query.stride() == query.stride()
    again = anyflex.flex_attention(query, query, query, backend="cpu.keeping")
    torch.testing.assert_close(found, torch.autograd.grad(again.square().sum(), query)[0])


def plain(*inputs: Tensor) -> Tensor:
    return anyflex.flex_attention(*inputs, enable_gqa=True, backend="cpu.keeping")


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(attend, id="learned"),
        *([pytest.param(plain, id="plain")] if SOAK else []),
    ],
)
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda t: t.half() if t.is_floating_point() else t, ArgumentTypeError),
        (lambda t: t.double() if t.is_floating_point() else t, ArgumentTypeError),
        (lambda t: t[:, :, :-1] if t.dim() > 2 else t, ArgumentError),
        (lambda t: t.to_sparse() if t.is_floating_point() else t, ArgumentError),
    ],
    ids=["half", "double", "shorter", "sparse"],
)
def test_a_compiled_programs_hooks_are_checked_too(
    call: Callable[..., Tensor], change: Callable[[Tensor], Tensor], error: type[Exception]
) -> None:
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    out, _ = hooked(change, call=compiled)
    with pytest.raises(error, match=f"must .*{CURE}"):
        out.sum().backward()
    assert not KeepingBackend.found


@pytest.mark.parametrize(
    "name", ["captured tensor 'SLOPES'", "lse", *(["key", "value"] if SOAK else [])]
)
def test_a_compiled_program_names_the_tensor(name: str) -> None:
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    out, _ = hooked(lambda tensor: tensor.half(), name, compiled)
    known = name.replace("'SLOPES'", "0")
    with pytest.raises(ArgumentTypeError, match=f"^{known} must have dtype torch.float32, got"):
        out.sum().backward()
    assert not KeepingBackend.found


@pytest.mark.parametrize("size", [4, *([0] if SOAK else [])])
def test_the_memory_that_a_compiled_program_keeps_for_the_kernel_is_checked(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeepingBackend, "saved_bytes", lambda self, dtype: (0, 64))
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found: list[Tensor] = []

    def change(tensor: Tensor) -> Tensor:
        if tensor.dtype is not torch.uint8:
            return tensor
        found.append(tensor)
        return shrunk(size)(tensor)

    out, _ = hooked(change, call=compiled)
    assert len(found) == 1
    with pytest.raises(ArgumentError, match="^what the kernel keeps for backward of shape"):
        out.sum().backward()
    assert not KeepingBackend.found


def test_a_compiled_programs_runs_are_checked_too() -> None:
    mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k - 3, None, None, 6, 9, BLOCK_SIZE=2)

    def masked(*inputs: Tensor) -> Tensor:
        return anyflex.flex_attention(*inputs, block_mask=mask, enable_gqa=True)

    compiled = torch.compile(masked, backend="aot_eager", fullgraph=True)
    out, _ = hooked(lambda t: t.long() if t.dtype is torch.int32 else t, call=compiled)
    with pytest.raises(BlockMaskError, match="offsets must have dtype int32, got torch.int64"):
        out.sum().backward()


@pytest.mark.parametrize("heads", [3, *([0, 8] if SOAK else [])])
def test_a_compiled_programs_keys_of_other_heads_reach_no_kernel(heads: int) -> None:
    """Alone they fit each other, and dout says nothing of their number of heads."""
    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    query, key, value = leaves()

    def unpack(tensor: Tensor) -> Tensor:
        keys = tensor.shape in (key.shape, value.shape)
        return tensor.new_zeros(1, heads, *tensor.shape[2:]) if keys else tensor

    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        out = compiled(query, key.detach(), value.detach())
    with pytest.raises(ArgumentError, match="heads?,? "):
        out.sum().backward()
    assert not KeepingBackend.found


def test_a_compiled_programs_offsets_of_another_batch_reach_no_kernel() -> None:
    masks = [
        anyflex.create_block_mask(lambda b, h, q, k: q >= k - b, batch, None, 6, 9, BLOCK_SIZE=2)
        for batch in (4, 2)
    ]
    inputs = [tensor.detach().expand(4, -1, -1, -1).requires_grad_() for tensor in leaves()]
    structure = {
        masks[0].offsets.shape: masks[1].offsets,
        masks[0].runs.shape: masks[1].runs,
    }

    def masked(*inputs: Tensor) -> Tensor:
        return anyflex.flex_attention(*inputs, block_mask=masks[0], enable_gqa=True)

    compiled = torch.compile(masked, backend="aot_eager", fullgraph=True)
    with saved_tensors_hooks(lambda tensor: tensor, lambda t: structure.get(t.shape, t)):
        out = compiled(*inputs)
    with pytest.raises(BlockMaskError, match="batch B' = 2, the call has B = 4"):
        out.sum().backward()
    assert not KeepingBackend.found


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("captured", lambda t: t.to_sparse(), ArgumentError, "captured tensor 0 must be dense"),
        ("saved", lambda t: t.int(), ArgumentTypeError, "saved must have dtype torch.uint8"),
        ("scale", lambda t: t.half(), ArgumentTypeError, "a number of the call must have dtype"),
    ],
)
def test_a_compiled_programs_other_tensors_are_checked_too(
    name: str,
    change: Callable[[Tensor], Tensor],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(KeepingBackend, "saved_bytes", lambda self, dtype: (0, 64))
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)

    def unpack(tensor: Tensor) -> Tensor:
        kinds = {
            "captured": tensor.shape == SLOPES.shape,
            "saved": tensor.dtype is torch.uint8,
            "scale": tensor.dim() == 0,
        }
        return change(tensor) if kinds[name] else tensor

    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        out = compiled(*leaves())
    with pytest.raises(error, match=f"^{message}.*{CURE}"):
        out.sum().backward()
    assert not KeepingBackend.found


def test_a_captured_tensor_on_another_device_reaches_no_kernel() -> None:
    """A machine without accelerators can't bring one through the op."""
    flags = (False, False, False)
    request = Request("", "", (1, 0, 0), *flags, flags, None, (), None, NOTHING, "highest")
    with pytest.raises(ArgumentError, match="^captured tensor 0 must be on cuda:0, got cpu"):
        custom_ops._check_captured([SLOPES], request, torch.device("cuda:0"))
