"""Packed calls under torch.compile: the backend's own layout, one graph for all lengths."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import anyflex
from anyflex.packed import op_implementation
from anyflex.packed.packed_op import packed_op
from tests.packed.dense_formula import Sequence, dense_formula

__all__: list[str] = []

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SPANS = torch.tensor([3, 100, 7])


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[h] * (kv_idx - q_idx)


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < SPANS[b])


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def natively(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets a 1 for each call in the backend's own layout, else a 0."""
    found = []
    in_own_layout = op_implementation.in_own_layout

    def counted(*given: Any) -> Any:
        outputs = in_own_layout(*given)
        found.append(int(outputs is not None))
        return outputs

    monkeypatch.setattr(op_implementation, "in_own_layout", counted)
    return found


def attend(
    rows: Tensor, keys: Tensor, step: anyflex.Step, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    aux = anyflex.AuxRequest(lse=True)
    out, more = anyflex.flex_attention_packed(
        rows, keys, keys * 2, step, alibi, window, enable_gqa=True, sinks=sinks, return_aux=aux
    )
    return out, more.lse


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("with_sinks", [False, True])
@torch.no_grad()
def test_one_graph_serves_all_lengths_by_native_kernels(
    with_sinks: bool, natively: list[int]
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(attend, fullgraph=True, backend=counter)
    sinks = torch.tensor([0.3, -1.0, 2.0, -torch.inf]) if with_sinks else None
    for lengths in ((3, 0, 5), (1, 9, 2), (0, 0, 2), (40, 1, 7)):
        batch = anyflex.Packed(offsets(lengths), max_q=64, max_kv=64)
        rows, keys = torch.randn(sum(lengths) + 2, 4, 8), torch.randn(sum(lengths) + 2, 2, 8)
        for each in (rows, keys):
            torch._dynamo.mark_dynamic(each, 0)
        out, lse = compiled(rows, keys, batch.begin(), sinks)
        sequences = [
            Sequence(slice(begin, end), 0, i, torch.arange(begin, end))
            for i, (begin, end) in enumerate(pairwise(offsets(lengths).tolist()))
        ]
        exact = (each.double() for each in (rows, keys, keys * 2))
        wide = None if sinks is None else sinks.double()
        wanted = dense_formula(*exact, sequences, alibi, window, wide)
        torch.testing.assert_close((out.double(), lse.double()), wanted, rtol=2e-5, atol=2e-5)
    assert counter.frame_count == 1
    assert natively == [1] * 4


@torch.no_grad()
def test_numbers_that_a_mask_captured_may_change_between_calls(natively: list[int]) -> None:
    compiled: Any = torch.compile(attend, fullgraph=True, backend="aot_eager")
    rows, keys, step = torch.randn(8, 4, 8), torch.randn(8, 2, 8), anyflex.Packed(offsets((8,)))
    spans = SPANS.clone()
    try:
        for span in (1, 8, 2):
            SPANS[0] = span
            eager = attend(rows, keys, step.begin())
            assert all(map(torch.equal, compiled(rows, keys, step.begin()), eager))
    finally:
        SPANS.copy_(spans)
    assert natively == [1] * 3


@torch.no_grad()
def test_a_batch_with_room_for_more_sequences_is_compiled(natively: list[int]) -> None:
    table = torch.arange(8, dtype=torch.int32).view(4, 2)
    batch = anyflex.Packed.with_capacity(4, max_q=2, max_kv=8, page_table=table)
    pool = torch.randn(8, 2, 4, 8)

    def call(rows: Tensor) -> Any:
        return anyflex.flex_attention_packed(rows, pool, pool, batch.begin(), enable_gqa=True)

    compiled: Any = torch.compile(call, fullgraph=True, backend="eager")
    for slots in ([2], [3, 1], []):
        batch.set([1] * len(slots), [5] * len(slots), slots)
        rows = torch.randn(4, 4, 8)
        assert torch.equal(compiled(rows), call(rows))
    assert natively == [1] * 3


@pytest.mark.parametrize("name", ["query", "key"])
@torch.no_grad()
def test_offsets_that_leave_the_rows_are_named_when_a_program_runs(name: str) -> None:
    own, others = torch.tensor([0, 3, 9], dtype=torch.int32), offsets((3, 5))
    of_rows, of_keys = (own, others) if name == "query" else (others, own)
    pool = torch.randn(8, 2, 8)

    @torch.compile(fullgraph=True, backend="eager")
    def call(rows: Tensor) -> Any:
        batch = anyflex.Packed(of_rows, kv_offsets=of_keys, max_q=8, max_kv=8)
        return anyflex.flex_attention_packed(rows, pool, pool, batch.begin(), enable_gqa=True)

    with pytest.raises(anyflex.ArgumentError, match=f"{name} must have at least the 9 rows"):
        call(torch.randn(8, 4, 8))


def test_packed_training_stays_a_dense_call(natively: list[int]) -> None:
    compiled: Any = torch.compile(attend, fullgraph=True, backend="aot_eager")
    step = anyflex.Packed(offsets((3, 5)), max_q=5, max_kv=5).begin()
    leaves = [torch.randn(8, heads, 8, requires_grad=True) for heads in (4, 2)]
    found, wanted = (
        torch.autograd.grad(call(*leaves, step)[0].square().sum(), leaves)
        for call in (compiled, attend)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert natively == []


def test_a_program_exported_without_gradients_refuses_them() -> None:
    class Attention(torch.nn.Module):
        def forward(self, rows: Tensor, keys: Tensor, q_offsets: Tensor) -> Tensor:
            step = anyflex.Packed(q_offsets, max_q=5, max_kv=5).begin()
            return attend(rows, keys, step)[0]

    given = torch.randn(8, 4, 8), torch.randn(8, 2, 8), offsets((3, 5))
    program = torch.export.export(Attention(), given).module()
    learning = [each.clone().requires_grad_() for each in given[:2]]
    # Weights of a program that runs outside of torch.no_grad() learn too.
    found = program(*learning, given[2])
    torch.testing.assert_close(found, Attention()(*given), rtol=1e-5, atol=1e-5)
    with pytest.raises(anyflex.ArgumentError, match="packed call in a program that was exported"):
        found.sum().backward()
    assert learning[0].grad is None


@torch.no_grad()
def test_a_spec_that_no_backend_takes_as_it_is_runs_on_core(
    natively: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from anyflex.errors import BackendRefused
    from anyflex.packed import own_layout

    def refused(inputs: Any) -> Any:
        raise BackendRefused("no kernel", {})

    monkeypatch.setattr(own_layout, "plan_for", refused)
    options = {"reference": {}}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(rows: Tensor, keys: Tensor, step: anyflex.Step) -> Any:
        return anyflex.flex_attention_packed(
            rows, keys, keys, step, alibi, window, enable_gqa=True, kernel_options=options
        )

    rows, keys = torch.randn(8, 4, 8), torch.randn(8, 2, 8)
    step = anyflex.Packed(offsets((3, 5)), max_q=5, max_kv=5).begin()
    sequences = [Sequence(slice(0, 3), 0, 0, torch.arange(3))]
    sequences.append(Sequence(slice(3, 8), 0, 1, torch.arange(3, 8)))
    exact = (each.double() for each in (rows, keys, keys))
    wanted, _ = dense_formula(*exact, sequences, alibi, window)
    torch.testing.assert_close(call(rows, keys, step).double(), wanted, rtol=2e-5, atol=2e-5)
    assert natively == [0]


def test_batch_invariance_is_recorded_or_refused(natively: list[int]) -> None:
    asked: list[bool] = []

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(rows: Tensor, keys: Tensor, step: anyflex.Step, backend: str | None = None) -> Any:
        return anyflex.flex_attention_packed(
            rows, keys, keys, step, enable_gqa=True, batch_invariant=True, backend=backend
        )

    def noted(checked: Any, *rest: Any) -> Any:
        asked.append(checked.batch_invariant)
        return counted(checked, *rest)

    counted = op_implementation.in_own_layout
    rows, keys = torch.randn(8, 4, 8), torch.randn(8, 2, 8)
    step = anyflex.Packed(offsets((3, 5)), max_q=5, max_kv=5).begin()
    with torch.no_grad(), mock.patch.object(op_implementation, "in_own_layout", noted):
        together = call(rows, keys, step)
        alone = anyflex.Packed(offsets((3,)), max_q=3, max_kv=3).begin()
        assert torch.equal(call(rows[:3], keys[:3], alone), together[:3])
    assert asked == [True, True] and natively == [1, 1]
    with torch.no_grad(), pytest.raises(Exception, match="batch_invariant=True"):
        call(rows, keys, step, "reference")
    with pytest.raises(Exception, match=r"under torch\.no_grad"):
        call(rows.requires_grad_(), keys, step)


@torch.no_grad()
def test_torchs_checks_of_operations_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from anyflex.packed import recorded_call

    calls = []

    def recorded(*given: Any) -> Any:
        calls.append(given)
        return packed_op(*given)

    monkeypatch.setattr(recorded_call, "packed_op", recorded)
    monkeypatch.setattr("anyflex.packed.attention.in_graph", lambda: True)
    step = anyflex.Packed(offsets((3, 5))).begin()
    attend(torch.randn(8, 4, 8), torch.randn(8, 2, 8), step)
    torch.library.opcheck(packed_op, calls[0])
