"""Dropout: the function that decides about pairs, its seeds, and whose generator they come from.

The conformance kit compares results and gradients with the dense formula, on every backend.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import anyflex
from anyflex.contract.dropout import SEEDS, Dropout
from anyflex.errors import BackendRefused, GraphCaptureError
from anyflex.plugin import (
    Accepted,
    Artifacts,
    Backend,
    Capabilities,
    Decision,
    Kernel,
    Spec,
    isolated,
    register,
)
from anyflex.reference.dropout import kept_pairs
from anyflex.testing import dropout_mask

__all__: list[str] = []

SIDE = 512
P = 0.1


def kept(
    seed: int, p: float = P, b: int = 0, h: int = 0, first: tuple[int, int] = (0, 0)
) -> Tensor:
    """Bool [SIDE, SIDE], of the query rows and the keys from `first` on."""
    inputs = {"b": torch.tensor(b), "h": torch.tensor(h)}
    inputs["q_idx"] = torch.arange(first[0], first[0] + SIDE)[:, None]
    inputs["kv_idx"] = torch.arange(first[1], first[1] + SIDE)
    return kept_pairs(Dropout(p, seed), inputs)


def deviations(dropped: Tensor, p: float) -> Tensor:
    """Numbers that would be normal with mean 0 and variance 1 if pairs were drawn apart."""
    count = dropped.shape[-1]
    return (dropped.sum(-1) - count * p) / (count * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("seed", [0, 1, 1 << 32, 0x12345678_9ABCD % SEEDS, SEEDS - 1])
def test_the_reference_keeps_the_pairs_of_the_kit(seed: int) -> None:
    sizes = (3, 5, 70, 300)
    b, h, q, k = (torch.arange(size) for size in sizes)
    inputs = {"b": b.view(-1, 1, 1, 1), "h": h.view(-1, 1, 1), "q_idx": q[:, None], "kv_idx": k}
    for p in (0.0, 1e-12, 0.1, 0.5, 1 - 2**-30):
        mine = kept_pairs(Dropout(p, seed), inputs)
        assert torch.equal(mine, dropout_mask.kept_pairs(seed, p, *sizes))
    assert kept_pairs(Dropout(0.0, seed), inputs).all()


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5])
def test_each_row_and_key_drops_its_share(p: float) -> None:
    dropped = torch.stack([~kept(seed, p, seed % 3, seed % 5) for seed in range(20)])
    total = deviations(dropped.flatten(), p)
    rows, keys = deviations(dropped, p), deviations(dropped.transpose(1, 2), p)
    assert total.abs() < 4
    for counts in (rows, keys):
        assert counts.abs().max() < 6
        # The counts of 10240 rows scatter as independent pairs' do.
        assert abs(counts.var() - 1) < 5 * (2 / counts.numel()) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_no_two_rows_keys_heads_batches_or_seeds_drop_alike(p: float) -> None:
    def standard(dropped: Tensor) -> Tensor:
        return (dropped.double() - p) / (p * (1 - p)) ** 0.5

    base = standard(~kept(7, p))
    for matrix in (base, base.T):
        alike = matrix @ matrix.T / SIDE
        alike.fill_diagonal_(0)
        assert alike.abs().max() < 8 / SIDE**0.5
        assert abs(alike.square().mean() * SIDE - 1) < 0.05
    others = [kept(8, p), kept(7 + (1 << 32), p), kept(7, p, b=1), kept(7, p, h=1)]
    others += [kept(7, p, b=1, h=1), kept(7, p, first=(SIDE, 0)), kept(7, p, first=(0, SIDE))]
    tables = [base, *(standard(~other) for other in others)]
    for one, other in itertools.combinations(tables, 2):
        for shifted in (other, other.T, other.roll(1, 0), other.roll(1, 1), other.flip(1)):
            assert abs((one * shifted).mean()) < 5 / SIDE


def test_no_frequency_stands_out() -> None:
    for seed in range(8):
        table = (~kept(seed)).double() - P
        power = torch.fft.fft2(table).abs().square() / (P * (1 - P) * table.numel())
        power[0, 0] = 0
        # The largest of n exponential numbers is near log n.
        assert power.max() < 1.6 * torch.tensor(float(table.numel())).log()


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn((1, 2, 40, 8), generator=generator).requires_grad_() for _ in "qkv"
    )
    return query, key, value


def attend(query: Tensor, key: Tensor, value: Tensor, p: float = P) -> Tensor:
    out: Tensor = anyflex.flex_attention(query, key, value, dropout_p=p, backend="reference")
    return out


def test_a_call_draws_one_number_of_the_cpu_generator() -> None:
    torch.manual_seed(5)
    first = attend(*tensors())
    after = torch.get_rng_state()
    torch.manual_seed(5)
    seed = int(torch.randint(SEEDS, (), dtype=torch.float64).item())
    assert torch.equal(torch.get_rng_state(), after)
    assert seed == dropout_mask.seed_of(5)
    torch.manual_seed(5)
    assert torch.equal(attend(*tensors()), first)
    assert not torch.equal(attend(*tensors()), first)


def test_nothing_is_drawn_without_dropout_or_by_explain() -> None:
    before = torch.get_rng_state()
    none = attend(*tensors(), p=0.0)
    assert torch.equal(none, attend(*tensors(), p=0))
    found = anyflex.explain(*tensors(), dropout_p=P, backend="reference")
    assert found.selection.spec.dropout
    assert "dropout" in str(found)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(none, anyflex.flex_attention(*tensors(), backend="reference"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_dropped_pairs(reentrant: bool) -> None:
    inputs = tensors()
    out = checkpoint(attend, *inputs, use_reentrant=reentrant)
    weight = torch.randn(out.shape)
    (out * weight).sum().backward()
    value = inputs[2]
    assert value.grad is not None
    # out is linear in value, through the weights that forward kept.
    torch.testing.assert_close((value.grad * value).sum(), (weight * out).sum())


def test_a_row_that_drops_every_pair_is_0_and_keeps_its_lse() -> None:
    query, key, value = (tensor[:, :, :1] for tensor in tensors())
    torch.manual_seed(0)
    outs = [
        anyflex.flex_attention(
            query, key, value, return_lse=True, dropout_p=0.5, backend="reference"
        )
        for _ in range(20)
    ]
    whole, lse = anyflex.flex_attention(query, key, value, return_lse=True, backend="reference")
    states = set()
    for out, again in outs:
        assert torch.equal(again, lse)
        for h in range(2):
            is_dropped = bool((out[0, h] == 0).all())
            states.add(is_dropped)
            torch.testing.assert_close(out[0, h], whole[0, h] * (0.0 if is_dropped else 2.0))
    assert states == {False, True}


class Refusing(Backend):
    """A backend that knows the fields of a contract before dropout."""

    capabilities = Capabilities(dtypes=frozenset({torch.float32}), head_dim_max=64)

    def probe(self) -> Decision:
        return Accepted()

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        raise AssertionError("it was asked to compile")


def test_a_backend_that_does_not_declare_dropout_refuses_it() -> None:
    with isolated():
        register("cpu.refusing", Refusing)
        with pytest.raises(BackendRefused, match=r"attention dropout \(dropout_p\) is not supp"):
            anyflex.flex_attention(
                *(tensor.detach() for tensor in tensors()), dropout_p=P, backend="cpu.refusing"
            )


def test_a_graph_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiled before, because a capture refuses that too.
    for p in (0.0, P):
        attend(*tensors(), p)
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
    with pytest.raises(GraphCaptureError, match=r"each replay would drop the same.*dropout_p=0"):
        attend(*tensors())
    attend(*tensors(), p=0.0)
