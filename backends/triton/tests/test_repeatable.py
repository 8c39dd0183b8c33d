"""Deterministic gradients of captured tensors: under torch.use_deterministic_algorithms the order
of programs changes no bit, and the sums are right."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.plugin import isolated, register
from anyflex.testing import posing

pytest.importorskip("triton", reason="there is no Triton to interpret with")

from triton.runtime import interpreter

from anyflex_triton.backend import TritonBackend

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LENGTH = 80


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with isolated(), posing("cuda"):
        register("cuda.mine", TritonBackend)
        yield
    torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let the interpreter run programs from the last to the first inside its context."""
    builder = interpreter.interpreter_builder
    ordered = builder.set_grid_idx
    with monkeypatch.context() as patch:
        patch.setattr(
            builder, "set_grid_idx", lambda x, y, z: ordered(builder.grid_dim[0] - 1 - x, y, z)
        )
        yield patch


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(
    table: Tensor, factor: Tensor, scale_of_dout: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the query, of a table that neighbouring distances share, and of a
    number."""
    query, key, value = (randn(2, 2, LENGTH, 16, seed=i).requires_grad_() for i in range(3))
    table, factor = table.clone().requires_grad_(), factor.clone().requires_grad_()

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * factor + table[(q_idx - kv_idx) % 3] + table[h]

    out = anyflex.flex_attention(query, key, value, score_mod, backend="cuda.mine")
    assert isinstance(out, Tensor)
    dout = randn(2, 2, LENGTH, 16, seed=3) * scale_of_dout
    dq, dtable, dfactor = torch.autograd.grad(out, (query, table, factor), dout)
    return dq, dtable, dfactor


def oracle(table: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (randn(2, 2, LENGTH, 16, seed=i).double() for i in range(3))
    query, table = query.requires_grad_(), table.double().clone().requires_grad_()
    factor = factor.double().clone().requires_grad_()
    rows, keys = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    scores = query @ key.mT / 4 * factor + table[(rows - keys) % 3]
    scores = scores + table[:2, None, None]
    out = scores.softmax(-1) @ value
    dout = randn(2, 2, LENGTH, 16, seed=3).double()
    dq, dtable, dfactor = torch.autograd.grad(out, (query, table, factor), dout)
    return dq, dtable, dfactor


@pytest.mark.parametrize("mode", ["off", "warn", "on"])
def test_order_changes_bits_only_where_they_may_change(
    mode: str, backwards: pytest.MonkeyPatch
) -> None:
    torch.use_deterministic_algorithms(mode != "off", warn_only=mode == "warn")
    table, factor = randn(3, seed=4), randn(seed=5)
    found = gradients(table, factor)
    backwards.undo()
    again = gradients(table, factor)
    assert torch.equal(found[0], again[0])
    same = [torch.equal(one, other) for one, other in zip(found[1:], again[1:], strict=True)]
    # One sum may be the same by chance.
    assert not all(same) if mode == "off" else all(same)
    for gradient, wanted in zip(found, oracle(table, factor), strict=True):
        error = (gradient.double() - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-5


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_gradients_of_any_size_are_right(scale: float) -> None:
    torch.use_deterministic_algorithms(True)
    table, factor = randn(3, seed=4), randn(seed=5)
    for gradient, wanted in zip(
        gradients(table, factor, scale), oracle(table, factor), strict=True
    ):
        torch.testing.assert_close(
            gradient.double() / scale, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item()
        )


@pytest.mark.parametrize("factor", [1e8, 1e15])
def test_one_large_addition_leaves_the_others_their_digits(factor: float) -> None:
    """One row of dout is larger than the others by this factor."""
    torch.use_deterministic_algorithms(True)
    query, key, value = (randn(1, 1, 64, 16, seed=i) for i in range(3))
    dout = randn(1, 1, 64, 16, seed=3)
    dout[0, 0, 9] *= factor
    table = randn(64, seed=4).requires_grad_()

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * table[q_idx]

    out = anyflex.flex_attention(query, key, value, score_mod, backend="cuda.mine")
    assert isinstance(out, Tensor)
    (gradient,) = torch.autograd.grad(out, table, dout)
    exact = table.detach().double().requires_grad_()
    scores = query.double() @ key.double().mT / 4 * exact[:, None]
    (wanted,) = torch.autograd.grad(scores.softmax(-1) @ value.double(), exact, dout.double())
    error = (gradient.double() - wanted).abs() / (wanted.abs() + 1e-3)
    assert error.max() < 1e-4


def test_what_is_not_finite_reaches_its_own_elements_alone() -> None:
    """The row of a table that holds infinity has a gradient of NaN, and no other row has."""
    torch.use_deterministic_algorithms(True)
    query, key, value = (randn(1, 1, 40, 16, seed=i) for i in range(3))
    table = randn(40, seed=4)
    table[7] = math.inf
    table.requires_grad_()
    query.requires_grad_()

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * table[q_idx]

    out = anyflex.flex_attention(query, key, value, score_mod, backend="cuda.mine")
    assert isinstance(out, Tensor)
    (gradient,) = torch.autograd.grad(out.sum(), table)
    torch.use_deterministic_algorithms(False)
    out = anyflex.flex_attention(query, key, value, score_mod, backend="cuda.mine")
    assert isinstance(out, Tensor)
    (usual,) = torch.autograd.grad(out.sum(), table)
    assert gradient.isnan().nonzero().flatten().tolist() == [7]
    torch.testing.assert_close(gradient, usual, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_table_without_elements_and_lengths_of_0() -> None:
    torch.use_deterministic_algorithms(True)
    for rows, size in ((40, 0), (0, 3)):
        query, key, value = (randn(1, 1, rows, 16, seed=i) for i in range(3))
        table = torch.randn(size).requires_grad_()

        def score_mod(
            score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, t: Tensor = table
        ) -> Tensor:
            return score + t[q_idx]

        out = anyflex.flex_attention(query, key, value, score_mod, backend="cuda.mine")
        assert isinstance(out, Tensor)
        (gradient,) = torch.autograd.grad(out.sum(), table)
        assert gradient.shape == (size,)
        assert not gradient.any()
