"""ANYFLEX_CHECK_INDICES=1: core looks at the reads of kernels that don't."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.contract.artifacts import Artifacts
from anyflex.contract.backend import Kernel
from anyflex.contract.call import Call, Outputs
from anyflex.contract.decision import Accepted, Decision
from anyflex.contract.spec import Spec
from anyflex.errors import ModIndexError
from anyflex.reference.backend import ReferenceBackend
from anyflex.registry import environment, isolated, register
from anyflex.testing import posing

TABLE = torch.arange(8.0)


class Zeros(Kernel):
    def forward(self, call: Call, out: Outputs) -> None:
        out.out.zero_()
        if out.lse is not None:
            out.lse.zero_()


class Careless(ReferenceBackend):
    def probe(self) -> Decision:
        return Accepted()

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        return Zeros()


@pytest.fixture(autouse=True)
def checking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ANYFLEX_CHECK_INDICES", "1")
    environment.reset()
    with isolated(), posing("brandnew"):
        register("brandnew.careless", Careless)
        yield
    environment.reset()


def attend(keys: int, block_mask: anyflex.BlockMask | None = None) -> Tensor:
    def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + TABLE[k]

    q, k = torch.randn(1, 2, 16, 8), torch.randn(1, 2, keys, 8)
    out = anyflex.flex_attention(q, k, k, biased, block_mask, backend="brandnew.careless")
    assert isinstance(out, Tensor)
    return out


def test_a_read_outside_of_a_captured_tensor_raises_before_the_kernel() -> None:
    assert attend(8).eq(0).all()
    with pytest.raises(
        ModIndexError, match=r"score_mod reads captured tensor .TABLE., shape \[8\]"
    ):
        attend(9)
    assert attend(0).eq(0).all()


def test_dead_pairs_may_read_anything() -> None:
    mask = anyflex.create_block_mask(lambda b, h, q, k: k < 8, None, None, 16, 20)
    assert attend(20, mask).eq(0).all()
    with pytest.raises(ModIndexError, match="kv_idx=8"):
        attend(20, anyflex.create_block_mask(lambda b, h, q, k: k < 9, None, None, 16, 20))


def test_nothing_is_looked_at_where_the_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANYFLEX_CHECK_INDICES")
    environment.reset()
    assert attend(9).eq(0).all()
