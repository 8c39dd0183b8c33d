"""Any value that a mod reads may change between calls: the next call sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.testing.oracle import dense_attention, dense_mask
from anyflex.testing.results import Forward, Results
from tests.changes.mod_change_cases import WAYS, ScoreMod
from tests.oracles.differences import differences
from tests.soak import SOAK

__all__: list[str] = []

pytestmark = pytest.mark.usefixtures("float64_numbers")

LENGTH = 40


def inputs(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn((1, 2, LENGTH, 4), generator=generator, dtype=torch.float64, **options)
        for _ in "qkv"
    )
    return query, key, value


def test_there_are_at_least_twenty_ways() -> None:
    assert len(WAYS) >= 20


UNSEEN_BY_DYNAMO = [
    "zero_then_negative_zero",
    "a_builtin_that_is_shadowed",
    "an_attribute_of_a_captured_tensor_that_need_not_be_there",
]
"""Ways for which torch.compile itself has no guard: plain torch functions stay stale too."""

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
    UNSEEN_BY_DYNAMO += [
        "a_class_attribute",
        "a_default_argument",
        "a_default_argument_that_is_a_list",
    ]


@pytest.mark.parametrize("name", WAYS)
def test_a_change_between_calls_is_seen(name: str) -> None:
    mod, steps = WAYS[name]()
    query, key, value = inputs()
    seen = [agreed(anyflex.flex_attention, query, key, value, mod)]
    for step in steps:
        # The same state twice: the second call may come from any cache.
        seen.append(agreed(anyflex.flex_attention, query, key, value, mod))
        mod = step() or mod
        seen.append(agreed(anyflex.flex_attention, query, key, value, mod))
    if name not in UNSEEN_IN_RESULTS:
        assert any(not torch.equal(seen[0], other) for other in seen[1:])


COMPILED = [name for name in WAYS if name not in UNSEEN_BY_DYNAMO]


@pytest.mark.parametrize("name", COMPILED[:: 1 if SOAK else 9])
def test_a_change_between_compiled_calls_is_seen(name: str) -> None:
    torch._dynamo.reset()
    attend = torch.compile(anyflex.flex_attention, backend="eager", fullgraph=True)
    mod, steps = WAYS[name]()
    query, key, value = inputs()
    agreed(attend, query, key, value, mod)
    for step in steps:
        mod = step() or mod
        agreed(attend, query, key, value, mod)


UNSEEN_IN_RESULTS = ("a_gradient_that_becomes_wanted",)
"""Ways that change something other than the numbers."""


def agreed(
    attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, mod: ScoreMod
) -> Tensor:
    """Attend, compare with the dense formula, and return the result."""
    with torch.no_grad():
        out = attend(query, key, value, mod)
        wanted = dense_attention(query, key, value, mod)
    assert differences(Results(Forward(out)), Results(Forward(wanted.out))) == []
    return out


def test_a_gradient_that_becomes_wanted_is_given() -> None:
    table = torch.linspace(0.0, 1.0, LENGTH, dtype=torch.float64)
    query, key, value = inputs()

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[k]

    assert not anyflex.flex_attention(query, key, value, mod).requires_grad
    table.requires_grad_()
    anyflex.flex_attention(query, key, value, mod).sum().backward()
    assert table.grad is not None
    table.requires_grad_(False)
    assert not anyflex.flex_attention(query, key, value, mod).requires_grad


def test_a_gradient_uses_the_values_of_its_forward() -> None:
    weight = [0.5]
    query, key, value = inputs(requires_grad=True)
    generator = torch.Generator().manual_seed(3)
    dout = torch.randn(query.shape, generator=generator, dtype=torch.float64)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * weight[0]

    wanted = dense_attention(query, key, value, mod).out
    (wanted_grad,) = torch.autograd.grad(wanted, query, dout)
    out = anyflex.flex_attention(query, key, value, mod)
    weight[0] = 3.0
    (grad,) = torch.autograd.grad(out, query, dout)
    found = Results(Forward(out), {"dq": grad})
    assert differences(found, Results(Forward(wanted), {"dq": wanted_grad})) == []


def test_a_mask_is_rebuilt_from_what_its_mod_reads_now() -> None:
    window = 5
    document = torch.arange(LENGTH) // 7
    query, key, value = inputs()

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q - k).abs() <= window) & (document[q] == document[k])

    for window_now, size in ((5, 7), (9, 7), (9, 20)):
        window = window_now
        document.copy_(torch.arange(LENGTH) // size)
        mask = anyflex.create_block_mask(mask_mod, 1, 1, LENGTH, LENGTH, BLOCK_SIZE=16)
        out = anyflex.flex_attention(query, key, value, block_mask=mask)
        live = dense_mask(mask_mod, 1, 1, LENGTH, LENGTH)
        wanted = dense_attention(query, key, value, None, live).out
        assert differences(Results(Forward(out)), Results(Forward(wanted))) == []


def test_the_numbers_of_one_call_do_not_reach_another_mod_of_the_same_code() -> None:
    query, key, value = inputs()

    def make(weight: float) -> ScoreMod:
        return lambda s, b, h, q, k: s * weight

    mods = [make(0.25 * i) for i in range(1, 6)]
    for mod in (*mods, *reversed(mods)):
        agreed(anyflex.flex_attention, query, key, value, mod)


def test_a_mod_freed_and_replaced_at_the_same_address_is_another_mod() -> None:
    query, key, value = inputs()
    for i in range(20):
        table = torch.full((LENGTH,), float(i), dtype=torch.float64)
        agreed(
            anyflex.flex_attention,
            query,
            key,
            value,
            lambda s, b, h, q, k, table=table: s + table[k] * k,
        )
        del table


CHANGED_IN_PLACE = [
    "a_parameter_loaded_from_a_state",
    "a_write_in_place",
    "a_write_into_a_view",
    "a_zero_dimensional_tensor_filled",
]


def untraced(mod: ScoreMod) -> ScoreMod:
    return lambda s, b, h, q, k: mod(s, b, h, q, k) * torch.special.i0(0 * s)


@pytest.mark.filterwarnings("ignore::anyflex.PerformanceWarning")
@pytest.mark.parametrize("name", WAYS)
def test_a_change_between_calls_is_seen_by_an_untraced_mod(name: str) -> None:
    mod, steps = WAYS[name]()
    query, key, value = inputs(requires_grad=True)
    dout = torch.linspace(-1.0, 1.0, query.numel(), dtype=torch.float64).view_as(query)
    first = None
    for step in (lambda: None, *steps):
        mod = step() or mod
        wanted = dense_attention(query, key, value, mod).out
        found = anyflex.flex_attention(query, key, value, untraced(mod))
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(
            torch.autograd.grad(found, (query, key, value), dout, retain_graph=True),
            torch.autograd.grad(wanted, (query, key, value), dout),
        )
        first = found if first is None else first
    if name in CHANGED_IN_PLACE:
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            first.backward(dout)
