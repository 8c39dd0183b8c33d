"""State of a step, and calls whose inputs change, are traced or need gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex

__all__: list[str] = []

CAUSAL = anyflex.masks.causal()


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def packed(*lengths: int) -> anyflex.Packed:
    return anyflex.Packed(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))


ROWS = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(0))
POOL = torch.randn(6, 2, 4, 16, generator=torch.Generator().manual_seed(1))
TABLE = torch.arange(6, dtype=torch.int32).view(1, 6)


def test_a_step_follows_numbers_that_were_written_since_the_last() -> None:
    lengths = int32(7)
    batch = anyflex.Packed(int32(0, 1), lengths, page_table=TABLE, max_q=1, max_kv=24)
    for length in (7, 12, 24):
        lengths.fill_(length)
        fresh = anyflex.Packed(int32(0, 1), int32(length), page_table=TABLE)
        found, wanted = (
            anyflex.flex_attention_packed(ROWS[:1], POOL, POOL, each.begin(), mask_mod=CAUSAL)
            for each in (batch, fresh)
        )
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("name", "numbers", "told"),
    [
        ("q_offsets", (0, 3, 4), "max_q = 2, and a sequence has 3"),
        ("q_offsets", (0, 2, 1), "q_offsets must start with 0 and not fall"),
        ("kv_lengths", (7, 25), "max_kv = 24, and a sequence has 25"),
        ("kv_lengths", (-1, 7), "kv_lengths must be at least 0"),
        ("slots", (1, 1), "slots must differ, got 1 twice"),
        ("slots", (0, 2), "page_table must have a row for each slot, got 2 rows and slot 2"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_numbers_beyond_the_bounds_are_refused_by_the_next_step(
    name: str, numbers: tuple[int, ...], told: str, begun: bool
) -> None:
    batch = anyflex.Packed(
        int32(0, 2, 3), int32(7, 9), page_table=TABLE.expand(2, 6), slots=int32(1, 0), max_q=2,
        max_kv=24,
    )  # fmt: skip
    if begun:
        batch.begin()
    getattr(batch, name).copy_(int32(*numbers))
    with pytest.raises(anyflex.ArgumentError, match=told):
        batch.begin()


def test_a_mask_mod_that_no_graph_holds_runs_on_the_reference() -> None:
    def far(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.special.bessel_j0((q_idx - kv_idx).float()) > 0.1

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx).abs() < 3  # bessel_j0 of whole numbers from 3 to 5 is below 0

    step = packed(3, 5).begin()
    with pytest.warns(anyflex.PerformanceWarning, match="bessel"):
        found = anyflex.flex_attention_packed(ROWS, ROWS, ROWS, step, mask_mod=far)
    wanted = anyflex.flex_attention_packed(ROWS, ROWS, ROWS, step, mask_mod=same)
    torch.testing.assert_close(found, wanted)


def test_a_mask_s_tensors_made_inside_of_it_are_told_apart() -> None:
    step = packed(8).begin()
    for limit in range(1, 8):
        table = torch.full((8,), limit)

        def below(b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Tensor = table) -> Any:
            return kv_idx < (table + 0)[q_idx]

        found = anyflex.flex_attention_packed(
            ROWS, ROWS, ROWS, step, mask_mod=below, backend="reference"
        )
        dense = anyflex.flex_attention(
            *(each.transpose(0, 1)[None] for each in (ROWS, ROWS[:limit], ROWS[:limit]))
        )
        torch.testing.assert_close(found, dense[0].transpose(0, 1))


@pytest.mark.parametrize("backend", ["reference", None])
def test_scales_learn_on_packed_rows_and_not_through_pages(backend: str | None) -> None:
    stored = (ROWS * 30).to(torch.int8)
    scale = torch.tensor([0.02, 0.03], requires_grad=True)
    out = anyflex.flex_attention_packed(
        ROWS, stored, stored, packed(3, 5).begin(), k_scale=scale, v_scale=scale, backend=backend
    )
    (slope,) = torch.autograd.grad(out.square().sum(), scale)
    assert slope.abs().min() > 0
    pages = (POOL * 30).to(torch.int8)
    step = anyflex.Packed(int32(0, 8), int32(20), page_table=TABLE).begin()
    with pytest.raises(anyflex.BackendRefused, match="k_scale requires grad"):
        anyflex.flex_attention_packed(ROWS, pages, pages, step, k_scale=scale, v_scale=scale)


@pytest.mark.parametrize("learning", ["query", "key", "value", "sinks", "out"])
def test_nothing_learns_through_an_output_that_is_given(learning: str) -> None:
    given = {"query": ROWS, "key": ROWS, "value": ROWS, "sinks": ROWS[0, :, 0]}
    given |= {"out": torch.empty(8, 2, 16)}
    given[learning] = given[learning].clone().requires_grad_()
    with pytest.raises(anyflex.ArgumentError, match=f"out is given and {learning} requires grad"):
        anyflex.flex_attention_packed(**given, step=packed(8).begin())


def test_a_traced_call_is_refused() -> None:
    step = packed(8).begin()
    with pytest.raises(anyflex.BackendRefused, match="torch.jit.trace"):
        torch.jit.trace(lambda rows: anyflex.flex_attention_packed(rows, rows, rows, step), ROWS)


def test_a_read_outside_of_a_captured_tensor_names_it() -> None:
    table = torch.zeros(3)

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[kv_idx]

    with pytest.raises(anyflex.ModIndexError, match="captured tensor 'table'"):
        anyflex.flex_attention_packed(ROWS, ROWS, ROWS, packed(8).begin(), biased)


def test_a_batch_of_inference_mode_is_set_outside_of_it() -> None:
    with torch.inference_mode():
        batch = anyflex.Packed.with_capacity(1, 1, 24, page_table=TABLE)
    batch.set([1], [5])
    anyflex.flex_attention_packed(ROWS[:1], POOL, POOL, batch.begin())
    with pytest.raises(anyflex.ArgumentTypeError, match="must be ints"):
        batch.set([1.0], [5])  # type: ignore[list-item]


def test_a_head_dim_of_nothing() -> None:
    nothing = torch.empty(8, 2, 0)
    with pytest.raises(anyflex.ArgumentError, match="head dim E must be positive"):
        anyflex.flex_attention_packed(nothing, nothing, nothing, packed(8).begin())


def test_a_call_that_core_relabels_is_refused_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, launched = packed(8).begin(), []
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
    monkeypatch.setattr("anyflex.packed.core_layout.flex_attention", launched.append)
    monkeypatch.setattr("anyflex.packed.core_layout.row_tables", launched.append)
    learning = ROWS.clone().requires_grad_()
    with pytest.raises(anyflex.GraphCaptureError, match="no backend takes this call's packed"):
        anyflex.flex_attention_packed(learning, ROWS, ROWS, step, mask_mod=CAUSAL)
    assert launched == []


def test_steps_of_a_cache_end_for_every_function() -> None:
    cache = anyflex.PagedKVCache(1, 6, 4, kv_heads=2, head_dim=16, slots=2)
    slot = cache.open()
    wanted: Any = [[slot, 5]]
    first = cache.step(wanted)
    assert first is not None
    cache.append(first, 0, ROWS[:5], ROWS[:5])
    wanted[0][1] = 1
    second = cache.step(wanted)
    assert second is not None and cache.length(slot) == 6
    with pytest.raises(anyflex.ArgumentError, match="begin another one"):
        anyflex.flex_attention_packed(ROWS[:5], cache.key[0], cache.value[0], first)
    with pytest.raises(anyflex.ArgumentError, match="1 new tokens, got 0"):
        cache.attend(second, 0, ROWS[:0])
    with pytest.raises(anyflex.ArgumentTypeError, match="list of ints, got bytes"):
        cache.prefix(b"12345678" * 4)
