"""Few specs: run-time values never compile anew."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import anyflex
from anyflex.contract.backend import Kernel
from anyflex.contract.call import Call, GradInputs, Grads, Outputs, Saved
from anyflex.contract.spec import Spec
from anyflex.runtime import plan
from anyflex.testing.float32_precision import products_in

__all__: list[str] = []

LENGTHS = (65, 66, 70, 72, 80, 81, 96, 100, 111, 112, 120, 128)


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    """Begin and end without any plan, and without a history of numbers."""
    plan.clear_plans()
    yield
    plan.clear_plans()


def specs() -> set[Spec]:
    """Specs that were planned since the test began."""
    return {one.spec for one in plan._plans.values()}


def inputs(
    batch: int, length: int, dim: int = 8, kv_length: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value; few keys make a call cheap."""
    generator = torch.Generator().manual_seed(length)
    kv_length = length if kv_length is None else kv_length
    query = torch.randn((batch, 2, length, dim), generator=generator)
    key, value = (torch.randn((batch, 2, kv_length, dim), generator=generator) for _ in "kv")
    return query, key, value


def test_layers_lengths_and_batches_share_one_spec() -> None:
    tables = [torch.randn(256) for _ in range(32)]
    for length in LENGTHS:
        mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, length, 8, BLOCK_SIZE=64)
        for batch in (1, 2, 3):
            tensors = inputs(batch, length, kv_length=8)
            for table in tables:
                anyflex.flex_attention(
                    *tensors,
                    lambda s, b, h, q, k, t=table: s + t[k],
                    mask,
                )
    assert len(specs()) == 1


def test_a_class_of_lengths_is_one_spec() -> None:
    for length in (1, 2, 3, 64, *LENGTHS):
        anyflex.flex_attention(*inputs(1, length))
    assert {spec.q_class for spec in specs()} == {"one", "short", "long"}
    assert len(specs()) == 3


def test_a_window_that_changes_each_call_takes_two_specs() -> None:
    query, key, value = inputs(1, 80)
    for window in range(5, 17):
        mask = anyflex.create_block_mask(
            lambda b, h, q, k, w=window: (q - k).abs() < w, 1, 1, 80, 80, BLOCK_SIZE=32
        )
        anyflex.flex_attention(query, key, value, block_mask=mask)
    assert len(specs()) <= 2


@pytest.mark.parametrize("values", [[0.1 * i for i in range(12)], list(range(12))])
def test_a_number_that_changes_each_call_takes_two_specs(values: list[Any]) -> None:
    query, key, value = inputs(1, 80)
    for weight in values:
        anyflex.flex_attention(query, key, value, lambda s, b, h, q, k, w=weight: s + k * w)
    assert len(specs()) <= 2


def test_strides_and_scales_are_no_part_of_a_spec() -> None:
    for scale in (None, 0.1, 0.2):
        for size in (64, 128):
            query, key, value = inputs(1, 80, size)
            part: Any = (slice(None), slice(None), slice(None), slice(0, 64))
            anyflex.flex_attention(query[part], key[part], value[part], scale=scale)
    assert len(specs()) == 1


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Calls that a kernel is given, forward and backward."""
    calls: list[Call] = []
    kernel = type(planned(*inputs(1, 80)).kernel)
    forward, backward = kernel.forward, kernel.backward

    def noting_forward(self: Kernel, call: Call, out: Outputs) -> None:
        calls.append(call)
        forward(self, call, out)

    def noting_backward(
        self: Kernel, call: Call, saved: Saved, grad: GradInputs, grads: Grads
    ) -> None:
        calls.append(call)
        backward(self, call, saved, grad, grads)

    monkeypatch.setattr(kernel, "forward", noting_forward)
    monkeypatch.setattr(kernel, "backward", noting_backward)
    return calls


def planned(*tensors: Tensor) -> plan.Plan:
    """The plan of a call."""
    anyflex.flex_attention(*tensors)
    *_, last = plan._plans.values()
    return last


def test_calls_of_the_same_shapes_and_strides_share_what_is_kept(seen: list[Call]) -> None:
    for scale in (None, 0.1):
        anyflex.flex_attention(*inputs(2, 80), scale=scale)
    first, second = seen
    assert first.kept is not None
    assert first.kept is second.kept


def test_backward_is_given_what_forward_kept(seen: list[Call]) -> None:
    tensors = [tensor.requires_grad_() for tensor in inputs(1, 80)]
    anyflex.flex_attention(*tensors).sum().backward()
    forward, backward = seen
    assert forward.kept is not None
    assert backward.kept is forward.kept


def test_the_static_op_s_calls_are_given_what_eager_calls_keep(seen: list[Call]) -> None:
    tensors = inputs(1, 80)
    anyflex.flex_attention(*tensors)
    with Watching():  # a watcher of the dispatcher still sees the op
        anyflex.flex_attention(*tensors)
    assert len(seen) == 2
    assert seen[0].kept is seen[1].kept is not None


def test_other_shapes_strides_masks_and_requests_keep_their_own(seen: list[Call]) -> None:
    query, key, value = inputs(2, 80)

    def heads_last(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    def masked(batch: int, heads: int, block: int = 128) -> None:
        blocks = -(-80 // block)
        counts = torch.full((batch, heads, blocks), blocks)
        mask = anyflex.BlockMask.from_kv_blocks(
            counts,
            torch.arange(blocks).expand(*counts.shape, blocks),
            BLOCK_SIZE=block,
            mask_mod=lambda b, h, q, k: q + b * 9 + h * 7 >= k,
            seq_lengths=(80, 80),
        )
        anyflex.flex_attention(query, key, value, block_mask=mask)

    anyflex.flex_attention(query, key, value)
    anyflex.flex_attention(*inputs(2, 81))
    anyflex.flex_attention(*inputs(2, 80, kv_length=72))
    anyflex.flex_attention(*inputs(3, 80))
    anyflex.flex_attention(query, key[:1], value[:1])
    anyflex.flex_attention(heads_last(query), key, value)
    anyflex.flex_attention(query, heads_last(key), value)
    anyflex.flex_attention(query, key, heads_last(value))
    anyflex.flex_attention(query, key, value, return_lse=True)
    anyflex.flex_attention(query, key, value, lambda s, b, h, q, k: s * 2)
    masked(1, 1)
    masked(2, 1)
    masked(1, 2)
    masked(1, 1, block=64)
    assert len({id(call.kept) for call in seen}) == len(seen) == 14


def test_no_more_than_so_many_shapes_are_remembered(
    seen: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "SHAPES", 3)
    for length in (70, 71, 72, 73, 70):
        anyflex.flex_attention(*inputs(1, length, kv_length=8))
    assert len(plan._by_shapes) <= 3
    # All were forgotten, and the first is planned again.
    assert seen[0].kept is not seen[-1].kept
    assert all(call.kept is not None for call in seen)


def test_a_size_of_one_may_have_any_stride(seen: list[Call]) -> None:
    query, key, value = inputs(1, 80)
    odd = query.as_strided(query.shape, (7, *query.stride()[1:]))
    assert odd.is_contiguous() and odd.stride() != query.stride()
    for first in (query, odd):
        anyflex.flex_attention(first, key, value)
    assert seen[0].kept is seen[1].kept


def test_what_is_kept_tells_no_calls_apart(seen: list[Call]) -> None:
    anyflex.flex_attention(*inputs(1, 80))
    (call,) = seen
    assert call.kept is not None
    call.kept["of a kernel"] = "a large thing"
    assert isinstance(hash(call), int)
    assert "a large thing" not in repr(call)


def test_threads_share_what_is_kept(seen: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(1, 90)
    none_has_planned = threading.Barrier(8)
    plan_of_class = plan._plan_of_class

    def planned_together(*given: Any) -> plan.Plan:
        none_has_planned.wait()
        return plan_of_class(*given)

    monkeypatch.setattr(plan, "_plan_of_class", planned_together)
    threads = [
        threading.Thread(target=anyflex.flex_attention, args=tensors, daemon=True)
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(seen) == 8
    assert seen[0].kept is not None
    assert len({id(call.kept) for call in seen}) == 1


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_has_the_products_of_its_forward(compiled: bool) -> None:
    attention = anyflex.flex_attention
    if compiled:
        attention = torch.compile(attention, backend="aot_eager", fullgraph=True)
    query = torch.randn(1, 2, 20, 8, requires_grad=True)
    for precision in ("high", "highest"):
        plan.clear_plans()
        with products_in(precision):
            out = attention(query, query, query)
        assert isinstance(out, Tensor)
        with products_in("highest" if precision == "high" else "high"):
            out.sum().backward()
        # One for both, or one for each.
        assert {spec.fp32_precision for spec in specs()} == {precision}
