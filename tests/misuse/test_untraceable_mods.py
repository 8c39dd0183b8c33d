"""Mods without a graph run through vmap; an error there is the mod's error."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import anyflex
from anyflex.errors import (
    ArgumentError,
    BackendRefused,
    BlockMaskError,
    ModIndexError,
    ModTraceError,
)
from anyflex.frontend import eager_call

__all__: list[str] = []

Mod = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore::anyflex.PerformanceWarning")
QUERY = torch.linspace(-1.0, 1.0, 128).view(1, 1, 16, 8)
TABLE = torch.linspace(0.1, 0.9, 16)
LAYER = torch.nn.Linear(1, 1)


def attend(mod: Mod, **options: Any) -> torch.Tensor:
    return anyflex.flex_attention(QUERY, QUERY, QUERY, mod, **options)


# Mods, each with the names that its message must hold.
BROKEN: dict[str, tuple[str, Mod]] = {
    "length of a slice": ("narrow", lambda s, b, h, q, k: s + TABLE.narrow(0, q, 1)[0]),
    "padding": ("pad", lambda s, b, h, q, k: s + F.pad(TABLE, (q, 0))[0]),
    "membership": ("__contains__", lambda s, b, h, q, k: torch.where(s in TABLE, s, 0.0)),
    "layer": ("linear", lambda s, b, h, q, k: LAYER(s)),
    "wrong rank": ("cartesian_prod", lambda s, b, h, q, k: torch.cartesian_prod(s)),
    "address": ("data_ptr", lambda s, b, h, q, k: s + s.data_ptr()),
    "storage": ("storage", lambda s, b, h, q, k: s + len(s.storage())),
    "item after": ("item", lambda s, b, h, q, k: torch.lgamma(s) * q.item()),
    "branch after": ("branch", lambda s, b, h, q, k: torch.lgamma(s) if q > k else s),
    "random after": ("random", lambda s, b, h, q, k: torch.lgamma(s) + torch.rand(())),
    "range after": ("range", lambda s, b, h, q, k: torch.lgamma(s) + torch.arange(q)[0]),
    "change after": ("in place", lambda s, b, h, q, k: torch.lgamma(s) + TABLE.add_(1.0)[k]),
    "grid": (r"shape \[1\]", lambda s, b, h, q, k: torch.meshgrid(s, indexing="ij")[0]),
    "strides": ("tuple", lambda s, b, h, q, k: s.stride()),
    "bool": ("bool", lambda s, b, h, q, k: torch.lgamma(s) > 0),
    "complex": ("complex", lambda s, b, h, q, k: torch.lgamma(s) * 1j),
    "nothing": ("NoneType", lambda s, b, h, q, k: (torch.lgamma(s), None)[1]),
}


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("name", BROKEN)
def test_what_vmap_cannot_run_is_the_mods_error(
    name: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, mod = BROKEN[name]
    before = TABLE.clone()
    monkeypatch.setattr(eager_call, "launch_forward", lambda *_: pytest.fail("it was launched"))
    with pytest.raises(ModTraceError, match=named) as caught:
        attend(mod, backend=backend)
    assert type(caught.value) is ModTraceError
    assert not caught.value.pure
    assert caught.value.file == __file__
    assert caught.value.operation
    if name not in ("grid", "strides", "bool", "complex", "nothing"):  # told after the mod is left
        assert caught.value.line == inspect.getsourcelines(mod)[1]
    assert torch.equal(TABLE, before)


def test_the_cause_is_kept() -> None:
    with pytest.raises(ModTraceError) as caught:
        attend(BROKEN["length of a slice"][1])
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "table of the operations" not in str(caught.value)
    assert "outside of the mod" in caught.value.hint


MASKS: dict[str, tuple[type[Exception], str, Mod]] = {
    "membership": (ModTraceError, "__contains__", lambda b, h, q, k: (q in TABLE) & (k > 2)),
    "item": (ModTraceError, "item", lambda b, h, q, k: torch.gcd(q, k) > q.item()),
    "change": (ModTraceError, "in place", lambda b, h, q, k: TABLE.add_(torch.gcd(q, k))[k] > 0),
    "change after": (
        ModTraceError,
        "in place",
        lambda b, h, q, k: (torch.gcd(q, k) > 1) & (TABLE.add_(1.0)[k] > 0),
    ),
    "int": (BlockMaskError, "dtype torch.int64", lambda b, h, q, k: torch.gcd(q, k)),
    "row": (BlockMaskError, r"shape \[16\]", lambda b, h, q, k: torch.gcd(q, k) > TABLE),
    "nothing": (BlockMaskError, "NoneType", lambda b, h, q, k: (torch.gcd(q, k), None)[1]),
    "outside": (
        ModIndexError,
        "out of bounds",
        lambda b, h, q, k: TABLE[torch.gcd(q, k) + 16] > 0,
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_mod_that_vmap_cannot_run_is_not_built(name: str) -> None:
    error, named, mod = MASKS[name]
    before = TABLE.clone()
    with pytest.raises(error, match=named) as caught:
        anyflex.create_block_mask(mod, 1, 1, 16, 16)
    assert type(caught.value) is error
    assert torch.equal(TABLE, before)


def test_numbers_are_results_of_untraceable_mods_too() -> None:
    found = attend(lambda s, b, h, q, k: (torch.lgamma(s), 2.0)[1])
    torch.testing.assert_close(found, attend(lambda s, b, h, q, k: s * 0.0))
    mask = anyflex.create_block_mask(lambda b, h, q, k: (torch.gcd(q, k), True)[1], 1, 1, 16, 16)
    assert mask.to_dense().all()


def test_an_error_of_the_mods_own_comes_out_as_it_is() -> None:
    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        torch.lgamma(s)
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="^mine") as caught:
        attend(mod)
    notes = getattr(caught.value, "__notes__", ["mod"])  # Python 3.10 has no notes
    assert any("mod" in note for note in notes)


def test_captured_numbers_that_an_untraceable_mod_returns_stay_as_they_are() -> None:
    number, row = torch.tensor(0.5), torch.linspace(0.1, 0.9, 16)
    mask = anyflex.create_block_mask(lambda b, h, q, k: q > k, 1, 1, 16, 16)
    for mod in (
        lambda s, b, h, q, k: (torch.lgamma(s), number)[1],
        lambda s, b, h, q, k: (torch.lgamma(s), row[k])[1],
    ):
        found = attend(mod, block_mask=mask)
        torch.testing.assert_close(
            found,
            attend(lambda s, b, h, q, k, mod=mod: mod(s, b, h, q, k) + 0 * s, block_mask=mask),
        )
    single = QUERY[:, :, :1]
    masked = anyflex.create_block_mask(lambda b, h, q, k: q > k, 1, 1, 1, 1)
    anyflex.flex_attention(
        single, single, single, lambda s, b, h, q, k: (torch.lgamma(s), number)[1], masked
    )
    assert number == 0.5


def test_gradients_of_an_untraceable_mod_reach_what_it_reads() -> None:
    weight = torch.linspace(0.5, 1.5, 16).requires_grad_()
    query = QUERY.clone().requires_grad_()

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.lgamma(s * s + 1.5) * weight[k]

    anyflex.flex_attention(query, QUERY, QUERY, mod).sum().backward()

    def dense(query: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        score = query @ QUERY.mT * 8**-0.5
        return (torch.lgamma(score * score + 1.5) * weight).softmax(-1) @ QUERY

    leaves = (QUERY.clone().requires_grad_(), weight.detach().clone().requires_grad_())
    wanted = torch.autograd.grad(dense(*leaves).sum(), leaves)
    torch.testing.assert_close(query.grad, wanted[0])
    torch.testing.assert_close(weight.grad, wanted[1])


def test_a_mod_that_calls_itself_without_end_is_refused_by_name_and_line() -> None:
    def deeper(x: Any) -> Any:
        return deeper(x + 1)

    def endless(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> Any:
        return deeper(score)

    said = r"score_mod \S*endless calls functions within each other .*test_untraceable_mods.py:\d+"
    for backend in (None, "reference"):
        with pytest.raises(ModTraceError, match=said) as caught:
            anyflex.flex_attention(QUERY, QUERY, QUERY, endless, backend=backend)
        assert caught.value.operation == "recursion" and "ever stop" in caught.value.hint
        assert caught.value.line in range(*lines_of(deeper))
    with pytest.raises(ModTraceError, match=r"mask_mod \S*<lambda> calls functions within"):
        anyflex.create_block_mask(lambda b, h, q, k: deeper(q) > k, None, None, 8, 8)
    with pytest.raises(ModTraceError, match="a mod that can't be traced calls functions within"):
        anyflex.flex_attention(
            QUERY, QUERY, QUERY, lambda s, b, h, q, k: deeper(torch.special.zeta(s, 2.0))
        )


TRANSFORMS: dict[str, Mod] = {
    "of a symbol": lambda s, b, h, q, k: torch.vmap(lambda x: x * 2)(s),
    "of the table": lambda s, b, h, q, k: s + torch.vmap(lambda x: x * 2)(TABLE)[k],
    "of both": lambda s, b, h, q, k: torch.vmap(lambda x: x * s)(TABLE)[k],
    "of other arguments": lambda s, b, h, q, k: torch.vmap(lambda x: x, in_dims=(0, 1))(s),
    "gradient": lambda s, b, h, q, k: torch.func.grad(lambda x: x * 2)(s),
    "after": lambda s, b, h, q, k: torch.vmap(torch.sin, in_dims=(0, 0))(torch.lgamma(s)),
    "derivative after": lambda s, b, h, q, k: torch.func.jvp(torch.sin, (torch.lgamma(s),), (s,))[
        1
    ],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_inside_a_mod_is_refused(name: str) -> None:
    mod = TRANSFORMS[name]
    with pytest.raises(
        ModTraceError, match=r"^a transform \(vmap, grad, jvp\) inside a mod"
    ) as seen:
        attend(mod)
    assert seen.value.line in range(*lines_of(mod)) and seen.value.file == __file__
    with pytest.raises(ModTraceError, match="inside a mod.*transform tensors outside of it"):
        anyflex.create_block_mask(lambda b, h, q, k: mod(q * 1.0, b, h, q, k) > k, 1, 1, 16, 16)


def test_a_value_error_of_the_mod_s_own_stays_what_it_is() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        attend(lambda s, b, h, q, k: s * int("seven"))


def test_where_a_mask_mod_that_no_graph_holds_may_not_run_the_operation_is_named() -> None:
    mask = anyflex.create_block_mask(lambda b, h, q, k: torch.lgamma(q + 1.0) >= k, 1, 1, 16, 16)
    named = r"torch operation lgamma is not one that a mod graph can hold .*test_untraceable_mods"
    for given in (mask, mask.row_slice(4, 8)):
        query = QUERY[:, :, : given.shape[2]]
        with pytest.raises(BackendRefused, match=f"mask_mod can't be traced: {named}") as caught:
            anyflex.flex_attention(query, QUERY, QUERY, block_mask=given, backend="cpu")
        assert "operation lgamma can't be traced" in caught.value.reasons["cpu"]
    with pytest.warns(anyflex.PerformanceWarning, match=f"mask_mod runs on the ref.*: {named}"):
        anyflex.flex_attention(QUERY, QUERY, QUERY, block_mask=mask)


def lines_of(function: Any) -> tuple[int, int]:
    lines, first = inspect.getsourcelines(function)
    return first, first + len(lines)


def test_a_mod_composed_of_more_functions_than_its_key_follows_is_traced_all_the_same() -> None:
    def nothing(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return score

    def after(inner: Any) -> Any:
        return lambda score, b, h, q, k: inner(score, b, h, q, k) + 1

    mod: Any = nothing
    for _ in range(sys.getrecursionlimit() * 6 // 10):
        mod = after(mod)
    out = anyflex.flex_attention(QUERY, QUERY, QUERY, mod, backend="reference")
    wanted = anyflex.flex_attention(QUERY, QUERY, QUERY, backend="reference")
    torch.testing.assert_close(out, wanted)


def test_a_gradient_through_what_hides_from_torch_is_never_lost_without_a_word() -> None:
    """The id of a temporary that is gone must not make a hidden tensor count as made here."""
    table = torch.randn(QUERY.shape[2], requires_grad=True)
    doubled = torch.jit.script(_doubled)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + torch.special.bessel_j0(s) * 0 + doubled(table)[k]

    query = QUERY.detach().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", anyflex.PerformanceWarning)
        out = anyflex.flex_attention(query, QUERY, QUERY, mod)
    with pytest.raises(ArgumentError, match="score_mod, which can't be traced, is called again"):
        out.sum().backward()


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_tensor_that_is_read_beside_its_detached_self_has_its_own_gradient() -> None:
    def mod_of(table: torch.Tensor) -> Any:
        def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            zero = torch.special.bessel_j0(s) * 0
            return s + zero + table[k] * table.detach()[k]

        return mod

    length = QUERY.shape[2]
    table = torch.randn(length, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", anyflex.PerformanceWarning)
        out = anyflex.flex_attention(QUERY, QUERY, QUERY, mod_of(table))
    dout = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, table, dout)
    bias = table * table.detach()
    scores = QUERY.double() @ QUERY.double().mT * QUERY.shape[3] ** -0.5 + bias.double()
    wanted = torch.autograd.grad(scores.softmax(-1) @ QUERY.double(), table, dout.double())[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [torch.Tensor.flatten, lambda table: table * 2.0, torch.sin])
def test_a_tensor_that_is_read_beside_one_made_of_it_has_both_gradients_once(make: Any) -> None:
    length = QUERY.shape[2]
    table = torch.randn(length, requires_grad=True)
    made = make(table)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + torch.special.bessel_j0(s) * 0 + table[k] + made[k] * table[q]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", anyflex.PerformanceWarning)
        out = anyflex.flex_attention(QUERY, QUERY, QUERY, mod)
    dout = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, table, dout, retain_graph=True)
    bias = (table + made * table[:, None]).double()
    scores = QUERY.double() @ QUERY.double().mT * QUERY.shape[3] ** -0.5 + bias
    wanted = torch.autograd.grad(scores.softmax(-1) @ QUERY.double(), table, dout.double())[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
