"""Wrong arguments of packed calls and their batches: typed errors that name the cure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex

__all__: list[str] = []

INT = torch.int32


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=INT)


TABLE = torch.zeros(2, 3, dtype=INT)
BATCHES = [
    (([0, 3],), {}, TypeError, "q_offsets must be an int32 tensor .* got list"),
    ((torch.tensor([0, 3]),), {}, TypeError, r"q_offsets must be int32, got torch.int64: use .to"),
    ((int32(),), {}, ValueError, r"q_offsets must have shape \[N \+ 1\]"),
    ((int32(0, 3).view(1, 2),), {}, ValueError, r"q_offsets must have shape \[N \+ 1\]"),
    ((int32(1, 3),), {}, ValueError, "q_offsets must start with 0 and not fall"),
    ((int32(0, 3, 2),), {}, ValueError, r"not fall, got \[0, 3, 2\]"),
    ((int32(0, 3), int32(3)), {}, ValueError, "kv_lengths needs kv_offsets"),
    ((int32(0, 3),), {"page_table": TABLE}, ValueError, "page_table needs kv_lengths"),
    (
        (int32(0, 3), int32(3)),
        {"page_table": TABLE, "kv_offsets": int32(0, 3)},
        ValueError,
        "no kv_offsets",
    ),
    ((int32(0, 3), int32(3, 4)), {"page_table": TABLE}, ValueError, "with N = 1, got"),
    ((int32(0, 3), int32(-1)), {"page_table": TABLE}, ValueError, "kv_lengths must be at least 0"),
    (
        (int32(0, 3), int32(4)),
        {"kv_offsets": int32(0, 3)},
        ValueError,
        r"must not exceed the rows .* got \[4\] for \[3\]",
    ),
    (
        (int32(0, 1, 2, 3), int32(1, 1, 1)),
        {"page_table": TABLE},
        ValueError,
        "a row for each sequence, got 2 rows for 3",
    ),
    (
        (int32(0, 1), int32(1)),
        {"page_table": TABLE, "slots": int32(2)},
        ValueError,
        "2 rows and slot 2",
    ),
    ((int32(0, 1, 2),), {"slots": int32(4, 4)}, ValueError, "slots must differ, got 4 twice"),
    ((int32(0, 1),), {"slots": int32(-1)}, ValueError, "at least 0, got -1"),
    ((int32(0, 3),), {"max_q": 2}, ValueError, "max_q = 2, and a sequence has 3"),
    ((int32(0, 3),), {"max_q": 2.0}, TypeError, "max_q must be an int, got float"),
    ((int32(0, 3),), {"max_kv": -1}, ValueError, "max_kv must be at least 0"),
    ((int32(0, 3).to("meta"),), {}, ValueError, "max_q must be given"),
]


@pytest.mark.parametrize(("given", "named", "kind", "told"), BATCHES)
def test_a_batch(given: Any, named: Any, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told) as caught:
        anyflex.Packed(*given, **named)
    assert isinstance(caught.value, anyflex.AnyflexError)


def test_a_batch_with_capacity() -> None:
    make = anyflex.Packed.with_capacity
    with pytest.raises(anyflex.ArgumentTypeError, match="sequences must be an int"):
        make(2.0, 1, 1, page_table=TABLE)  # type: ignore[arg-type]
    with pytest.raises(anyflex.ArgumentError, match="max_kv must be at least 0, got -2"):
        make(2, 1, -2, page_table=TABLE)
    batch = make(2, 3, 9, page_table=TABLE)
    for given, told in (
        (([1, 1, 1], [1, 1, 1]), "at most 2 sequences, got 3, 3 and 3"),
        (([1], [1, 1]), "got 1, 2 and 1"),
        (([4], [4]), "q_lengths must be from 0 to 3"),
        (([1], [10]), "kv_lengths must be from 0 to 9"),
        (([-1], [1]), "got -1 to -1"),
        (([1, 1], [1, 1], [1, 1]), "got 1 twice"),
        (([1], [1], [2]), "2 rows and slot 2"),
    ):
        with pytest.raises(anyflex.ArgumentError, match=told):
            batch.set(*given)
    with pytest.raises(anyflex.ArgumentError, match=r"make it by Packed\.with_capacity"):
        anyflex.Packed(int32(0, 1)).set([1], [1])


def test_a_step_of_a_batch_that_was_set_again() -> None:
    batch = anyflex.Packed.with_capacity(1, 2, 12, page_table=TABLE)
    batch.set([1], [1])
    step = batch.begin()
    batch.set([1], [2])
    pool = torch.randn(1, 1, 4, 8)
    with pytest.raises(anyflex.ArgumentError, match=r"set again .* Packed\.begin"):
        anyflex.flex_attention_packed(torch.randn(1, 1, 8), pool, pool, step)


ROWS, POOL = torch.randn(3, 2, 8), torch.randn(4, 2, 4, 8)
PACKED = anyflex.Packed(int32(0, 3))
PAGED = anyflex.Packed(int32(0, 3), int32(9), page_table=TABLE)
WIDE = torch.ones((), dtype=torch.float64)
STORED = POOL.to(torch.int8)
CALLS = [
    ((ROWS, ROWS, ROWS, PACKED), {}, TypeError, r"got Packed. Use step.begin\(\)"),
    ((ROWS, ROWS, ROWS, None), {}, TypeError, "step must be a Step, got NoneType"),
    (([], ROWS, ROWS, PACKED.begin()), {}, TypeError, "query must be a Tensor, got list"),
    ((ROWS[None], ROWS, ROWS, PACKED.begin()), {}, ValueError, r"query must be \[T, Hq, E\]"),
    ((ROWS, POOL, ROWS, PACKED.begin()), {}, ValueError, r"key must be \[S, Hkv, E\]"),
    ((ROWS, ROWS, ROWS, PAGED.begin()), {}, ValueError, r"key must be a pool of pages \[P"),
    ((ROWS, POOL, POOL[:2], PAGED.begin()), {}, ValueError, "key and value must have one shape"),
    ((ROWS, ROWS.to("meta"), ROWS, PACKED.begin()), {}, ValueError, "key is on meta"),
    ((ROWS[:2], ROWS, ROWS, PACKED.begin()), {}, ValueError, "key must have the rows of query"),
    ((ROWS[:2], ROWS[:2], ROWS[:2], PACKED.begin()), {}, ValueError, "at least the 3 rows"),
    ((ROWS[:2], POOL, POOL, PAGED.begin()), {}, ValueError, "query must have at least the 3"),
    ((ROWS, POOL[:, :, :0], POOL[:, :, :0], PAGED.begin()), {}, ValueError, "at least one row"),
    (
        (ROWS, POOL[:, :, :2], POOL[:, :, :2], PAGED.begin()),
        {},
        ValueError,
        "wide enough for max_kv = 9 keys in pages of 2, 5 columns, got 3",
    ),
    ((ROWS, ROWS, ROWS, PACKED.begin()), {"score_mod": 1}, TypeError, "score_mod must be a func"),
    ((ROWS, ROWS, ROWS, PACKED.begin()), {"mask_mod": 1}, TypeError, "mask_mod must be a func"),
    ((ROWS, ROWS, ROWS, PACKED.begin()), {"sinks": 1.0}, TypeError, r"sinks .* \[2\].*float"),
    ((ROWS, ROWS, ROWS, PACKED.begin()), {"sinks": torch.ones(3)}, ValueError, r"got \[3\]"),
    ((ROWS, POOL, POOL, PAGED.begin()), {"k_scale": 1.0}, TypeError, "k_scale .* got float"),
    ((ROWS, POOL, POOL, PAGED.begin()), {"v_scale": WIDE}, TypeError, "got torch.float64"),
    ((ROWS, POOL, POOL, PAGED.begin()), {"k_scale": torch.ones(2)}, TypeError, "key has dtype"),
    ((ROWS, STORED, STORED, PAGED.begin()), {}, ValueError, "key has dtype torch.int8: pass k_s"),
    (
        (ROWS, STORED, STORED, PAGED.begin()),
        {"k_scale": torch.ones(3), "v_scale": torch.ones(2)},
        ValueError,
        r"k_scale must be one number, \[2\] or \[4, 2, 4\], got \[3\]",
    ),
    ((ROWS, ROWS, ROWS, PACKED.begin()), {"out": 1}, TypeError, "out must be a Tensor"),
    (
        (ROWS, ROWS, ROWS, PACKED.begin()),
        {"out": ROWS[:2]},
        ValueError,
        r"out must be \[3, 2, 8\]",
    ),
    ((ROWS, ROWS, ROWS, PACKED.begin()), {"return_aux": True}, TypeError, "return_aux"),
    (
        (ROWS, ROWS, ROWS, PACKED.begin()),
        {"batch_invariant": 1},
        TypeError,
        "batch_invariant must be a bool, got int",
    ),
]


@pytest.mark.parametrize(("given", "named", "kind", "told"), CALLS)
def test_a_call(given: Any, named: Any, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told) as caught:
        anyflex.flex_attention_packed(*given, **named)
    assert isinstance(caught.value, anyflex.AnyflexError)


def test_gradients() -> None:
    learns = ROWS.clone().requires_grad_()
    pool = POOL.clone().requires_grad_()
    with pytest.raises(anyflex.BackendRefused, match="query requires grad, .* no backward"):
        anyflex.flex_attention_packed(learns, POOL, POOL, PAGED.begin())
    with pytest.raises(anyflex.BackendRefused, match="value requires grad"):
        anyflex.flex_attention_packed(ROWS, POOL, pool, PAGED.begin())
    with torch.no_grad():
        anyflex.flex_attention_packed(learns, POOL, pool, PAGED.begin())
    with pytest.raises(anyflex.ArgumentError, match="out is given and query requires grad"):
        anyflex.flex_attention_packed(learns, ROWS, ROWS, PACKED.begin(), out=torch.empty(3, 2, 8))


def test_batch_invariance_is_kept_or_refused() -> None:
    """A dense call of all rows hasn't it, nor a backend that doesn't name it."""
    asked: dict[str, Any] = {"batch_invariant": True}
    with pytest.raises(anyflex.BackendRefused, match="batch_invariant=True needs a k") as e:
        anyflex.flex_attention_packed(
            ROWS, ROWS, ROWS, PACKED.begin(), backend="reference", **asked
        )
    assert "reference" in e.value.reasons
    learns = ROWS.clone().requires_grad_()
    with pytest.raises(anyflex.BackendRefused, match=r"call it under torch\.no_grad\(\)"):
        anyflex.flex_attention_packed(learns, ROWS, ROWS, PACKED.begin(), **asked)
    none = anyflex.Packed(int32(0), kv_offsets=int32(0)).begin()
    assert not anyflex.flex_attention_packed(ROWS, ROWS, ROWS, none, **asked).any()


def test_sinks_without_memory() -> None:
    sinks = torch.zeros(2)
    sinks.untyped_storage().resize_(0)
    with pytest.raises(anyflex.ArgumentError, match="sinks"):
        anyflex.flex_attention_packed(ROWS, ROWS, ROWS, PACKED.begin(), sinks=sinks)


@pytest.mark.parametrize(
    ("changed", "value", "told"),
    [
        (0, 1.0, "out_a must be a Tensor, got float"),
        (1, torch.zeros(3), r"lse_a must be \[3, 2\] in torch.float32"),
        (2, ROWS.double(), "out_b must be .* got .* torch.float64"),
        (3, torch.zeros(3, 2, dtype=torch.float64), "lse_b must be"),
        (3, torch.zeros(3, 2, device="meta"), "lse_b must be on cpu"),
    ],
)
def test_merging(changed: int, value: Any, told: str) -> None:
    parts: list[Any] = [ROWS, torch.zeros(3, 2), ROWS, torch.zeros(3, 2)]
    parts[changed] = value
    with pytest.raises(anyflex.AnyflexError, match=told):
        anyflex.merge_attention(*parts)
