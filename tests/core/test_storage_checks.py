"""Tensors whose memory doesn't match their sizes and strides are refused before any launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import anyflex
from anyflex.errors import ArgumentError, ArgumentTypeError, BackendRefused, BlockMaskError
from anyflex.tensors.storage_checks import why_unreadable

SHAPE = (1, 2, 16, 8)


class Wrapper(Tensor):
    """Has no memory, and takes no operation."""

    @staticmethod
    def __new__(cls, wrapped: Tensor) -> Wrapper:
        made: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return made(cls, wrapped.shape, dtype=wrapped.dtype, device=wrapped.device)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return NotImplemented


class Subclass(Tensor):
    """A tensor like any other, with a class of its own."""


def resized(size: int, step: int = 1) -> Tensor:
    tensor = torch.randn(*SHAPE[:3], SHAPE[3] * step)[..., ::step]
    tensor.untyped_storage().resize_(size)
    return tensor


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.randn(SHAPE)


def kept_from(transform: Callable[..., Any], *given: Tensor) -> Tensor:
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.append(x)
        return x.sum()

    transform(function)(*given)
    return kept[0]


# Constructor of each tensor, and its message beside the name.
UNREADABLE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "zero": (lambda: torch._efficientzerotensor(SHAPE), "without memory of its own"),
    "fake": (fake, "every tensor of the call fake"),
    "functional": (
        lambda: torch._to_functional_tensor(torch.randn(SHAPE)),
        "without memory of its own",
    ),
    "kept from vmap": (
        lambda: kept_from(torch.func.vmap, torch.randn(3, *SHAPE)),
        r"without memory of its own .*\.clone\(\)",
    ),
    "freed": (lambda: resized(0), "storage of 1024 bytes and has one of 0,.*resize it back"),
    "short": (lambda: resized(400), r"storage of 1024 bytes and has one of 400,.*\.clone\(\)"),
    "short by one": (lambda: resized(1020), "storage of 1024 bytes and has one of 1020"),
    "short, strided": (
        lambda: resized(2044 - 4, step=2),
        r"strides \[512, 256, 16, 2\] needs a storage of 2044 bytes and has one of 2040",
    ),
}
MAKERS = pytest.mark.parametrize("made", UNREADABLE)
inputs = pytest.mark.parametrize("position", range(3), ids=["query", "key", "value"])


def given(position: int, tensor: Tensor) -> list[Tensor]:
    tensors = [torch.randn(SHAPE) for _ in range(3)]
    tensors[position] = tensor
    return tensors


def test_a_sparse_gradient_that_arrives_is_refused_with_its_cure() -> None:
    query = torch.randn(SHAPE, requires_grad=True)
    out, lse = anyflex.flex_attention(query, query, query, return_lse=True, backend="reference")
    for name, of in (("dout", out), ("dlse", lse)):
        arrives = torch.ones_like(of).to_sparse()
        with pytest.raises(
            ArgumentError, match=rf"^{name}, .* has layout .*pass its .to_dense\(\)"
        ):
            torch.autograd.grad(of, query, arrives, retain_graph=True)


@MAKERS
@inputs
def test_an_input_without_its_memory_is_refused(made: str, position: int) -> None:
    name = ("query", "key", "value")[position]
    with pytest.raises(ArgumentError, match=rf"\b{name}\b"):
        anyflex.flex_attention(*given(position, UNREADABLE[made][0]()), backend="reference")


@MAKERS
def test_the_message_of_an_input_tells_what_came_and_the_cure(made: str) -> None:
    make, said = UNREADABLE[made]
    with pytest.raises(ArgumentError, match=rf"query.*{said}"):
        anyflex.flex_attention(*given(0, make()), backend="reference")


@MAKERS
def test_a_captured_tensor_without_its_memory_is_refused_by_name(made: str) -> None:
    make, said = UNREADABLE[made]
    table = make()

    def score_mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return s + table[b, h, q, k % 8]

    with pytest.raises(ArgumentError, match=rf"^captured tensor 'table' .*{said}"):
        anyflex.flex_attention(*given(0, torch.randn(SHAPE)), score_mod, backend="reference")


@MAKERS
def test_no_mask_is_built_of_a_captured_tensor_without_its_memory(made: str) -> None:
    table = UNREADABLE[made][0]()
    with pytest.raises(BlockMaskError, match="captured tensor 'table', which (is|of)"):
        anyflex.create_block_mask(lambda b, h, q, k: table[0, 0, q, k % 8] > 0, 1, 1, 16, 16)


def test_a_masks_captured_tensor_that_shrinks_after_it_was_built_is_refused() -> None:
    table = torch.zeros(16)
    mask = anyflex.create_block_mask(lambda b, h, q, k: table[k] <= q, None, None, 16, 16)
    table.untyped_storage().resize_(40)
    with pytest.raises(
        ArgumentError, match="captured tensor 'table' .*64 bytes and has one of 40"
    ):
        anyflex.flex_attention(*given(0, torch.randn(SHAPE)), None, mask, backend="reference")


@MAKERS
@pytest.mark.parametrize("way", ["autograd", "flex_attention_backward"])
def test_a_gradient_without_its_memory_is_refused(made: str, way: str) -> None:
    make, said = UNREADABLE[made]
    query, key, value = (torch.randn(SHAPE, requires_grad=True) for _ in range(3))
    out, aux = anyflex.flex_attention(
        query, key, value, return_aux=anyflex.AuxRequest(lse=True), backend="reference"
    )
    refused: tuple[type[Exception], str] = (ArgumentError, rf"^dout.* .*{said}")
    if made == "kept from vmap" and way == "autograd":
        # autograd's own batching passes tensors that look the same.
        refused = (BackendRefused, "can't be batched")
    with pytest.raises(refused[0], match=refused[1]):
        if way == "autograd":
            torch.autograd.grad(out, query, make())
        else:
            detached = [t.detach() for t in (query, key, value, out, aux.lse)]
            anyflex.flex_attention_backward(make(), *detached, backend="reference")


@pytest.mark.parametrize("name", ["out", "lse", "dlse", "delta"])
def test_what_is_given_to_the_public_backward_must_have_its_memory(name: str) -> None:
    tensors: dict[str, Tensor] = {
        **{each: torch.randn(SHAPE) for each in ("dout", "query", "key", "value", "out")},
        **{each: torch.randn(SHAPE[:3]) for each in ("lse", "dlse", "delta")},
    }
    tensors[name].untyped_storage().resize_(8)
    with pytest.raises(ArgumentError, match=f"^{name}.* and has one of 8"):
        anyflex.flex_attention_backward(**tensors, backend="reference")


@inputs
def test_an_input_that_shrinks_between_forward_and_backward_is_refused(position: int) -> None:
    tensors = [torch.randn(SHAPE, requires_grad=True) for _ in range(3)]
    out = anyflex.flex_attention(*tensors, backend="reference")
    tensors[position].untyped_storage().resize_(0)
    name = ("query", "key", "value")[position]
    with pytest.raises(ArgumentError, match=f"^{name} .* and has one of 0"):
        out.sum().backward()


@inputs
def test_a_wrapper_that_takes_no_operation_is_refused_by_name(position: int) -> None:
    name = ("query", "key", "value")[position]
    with pytest.raises(ArgumentTypeError, match=f"^{name} is a Wrapper.*plain tensor") as caught:
        anyflex.flex_attention(*given(position, Wrapper(torch.randn(SHAPE))))
    assert isinstance(caught.value.__cause__, TypeError)


def test_wrappers_without_memory_are_refused_where_values_are_read() -> None:
    table = Wrapper(torch.randn(16))
    plain = given(0, torch.randn(SHAPE))
    with pytest.raises(ArgumentError, match="'table' is a Wrapper without memory of its own"):
        anyflex.flex_attention(*plain, lambda s, b, h, q, k: s + table[k])
    query = torch.randn(SHAPE, requires_grad=True)
    out = anyflex.flex_attention(query, *plain[1:])
    with pytest.raises(ArgumentError, match=r"^dout, .* is a Wrapper without memory"):
        torch.autograd.grad(out, query, Wrapper(torch.randn(SHAPE)))
    with pytest.raises(ArgumentTypeError, match=r"^query is a Wrapper"):
        anyflex.flex_attention_backward(
            torch.randn(SHAPE),
            Wrapper(torch.randn(SHAPE)),
            *plain[1:],
            torch.randn(SHAPE),
            torch.randn(SHAPE[:3]),
        )


def test_a_distributed_tensor_is_refused_by_name_and_to_local_is_the_cure() -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        query, key, value = (
            DTensor.from_local(torch.randn(SHAPE), mesh, [Replicate()]) for _ in range(3)
        )
        cure = r"DTensor.*pass its \.to_local\(\)"
        with pytest.raises(ArgumentTypeError, match=f"^query is a {cure}"):
            anyflex.flex_attention(query, key, value)
        with pytest.raises(ArgumentTypeError, match=f"^key is a {cure}"):
            anyflex.flex_attention(query.to_local(), key, value.to_local())
        local = [tensor.to_local() for tensor in (query, key, value)]
        assert anyflex.flex_attention(*local).shape == SHAPE
    finally:
        torch.distributed.destroy_process_group()


def test_fake_tensors_are_told_from_others_and_whole_calls_of_them_work() -> None:
    table = torch.zeros(16)
    with FakeTensorMode() as mode:
        query, key, value = (torch.randn(SHAPE) for _ in range(3))
        assert anyflex.flex_attention(query, key, value).shape == SHAPE
        with pytest.raises(ArgumentError, match="not fake: none.*also what score_mod"):
            anyflex.flex_attention(query, key, value, lambda s, b, h, q, k: s + table[k])
        known = mode.from_tensor(table)
        out = anyflex.flex_attention(query, key, value, lambda s, b, h, q, k: s + known[k])
        assert out.shape == SHAPE
    with pytest.raises(
        ArgumentError,
        match=r"^fake \(FakeTensor\): query, key, value; .* call while it is on",
    ):
        anyflex.flex_attention(query, key, value)
    with pytest.raises(ArgumentError, match=r"fake \(FakeTensor\): query; not fake: key, value"):
        anyflex.flex_attention(query, torch.randn(SHAPE), torch.randn(SHAPE))
    real = [torch.randn(SHAPE) for _ in range(3)]
    with (
        FakeTensorMode(),
        pytest.raises(ArgumentError, match="fake .*: none; not fake: query, key, value"),
    ):
        anyflex.flex_attention(*real)


def test_a_fake_tensor_is_refused_without_a_warning_of_torch() -> None:
    table = fake()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ArgumentError, match="is a FakeTensor"):
            anyflex.flex_attention(
                *given(0, torch.randn(SHAPE)), lambda s, b, h, q, k: s + table[0, 0, q, 0]
            )


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 4, 16, 8)[1:, ::2],
        torch.randn(1, 1, 1, 8).expand(SHAPE),
        torch.randn(1, 2, 8, 16).transpose(2, 3),
        torch.empty(1, 2, 0, 8),
        torch.nn.Parameter(torch.randn(SHAPE)),
        torch.randn(SHAPE).as_subclass(Subclass),
        torch.empty(10, 2, 16, 8)[9:],
    ],
    ids=["view", "expanded", "transposed", "empty", "parameter", "subclass", "at the end"],
)
def test_what_lies_in_its_memory_is_readable(tensor: Tensor) -> None:
    assert why_unreadable(tensor) == ""
    anyflex.flex_attention(tensor, tensor, tensor, backend="reference")


def test_an_offset_counts() -> None:
    tensor = torch.randn(2, 2, 16, 8)[1:]
    tensor.untyped_storage().resize_(2 * 1024 - 4)
    assert "2048 bytes and has one of 2044" in why_unreadable(tensor)
    with pytest.raises(ArgumentError, match="query .*2048 bytes"):
        anyflex.flex_attention(tensor, tensor, tensor)


def test_what_was_kept_from_a_gradient_is_refused() -> None:
    kept = kept_from(torch.func.grad, torch.randn(SHAPE))
    for position, name in enumerate(("query", "key", "value")):
        with pytest.raises(ArgumentError, match=f"{name} is a Tensor without memory"):
            anyflex.flex_attention(*given(position, kept))
    with pytest.raises(ArgumentError, match="captured tensor 'kept' is a Tensor without"):
        anyflex.flex_attention(
            *given(0, torch.randn(SHAPE)), score_mod=lambda s, b, h, i, j: s + kept[0, 0, i, 0]
        )
