"""Refusals of specs beyond the declared capabilities, each with its cure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from emulated_backend import Emulated
from torch import Tensor

import anyflex
from anyflex.plugin import (
    Accepted,
    ArgumentError,
    BackendRefused,
    CapturedFacts,
    Rejected,
    Spec,
    isolated,
    parse_graph,
    register,
)
from anyflex.testing import posing
from anyflex_mps.backend import MpsBackend
from anyflex_mps.refusals import MOST_BUFFERS, OWN_BUFFERS, buffer_count, option_refusal

PLAIN = Spec("mps", "apple9", torch.float32, 64, 64)
FULLEST = replace(
    PLAIN,
    dtype=torch.float16,
    mask_kind="runs",
    block_size=(128, 128),
    aux=("lse", "max_scores"),
    needs_lse=True,
    gradients=("q", "k", "v"),
    dlse=True,
)
"""A spec whose kernels have each buffer that they can have."""


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with isolated():
        register("mps", Emulated)
        yield


def reason(spec: Spec) -> str:
    decision = MpsBackend("mps", "mps").supports(spec)
    assert isinstance(decision, Rejected)
    return decision.reason


def query(length: int = 33) -> Tensor:
    return torch.randn(1, 1, length, 16, generator=torch.Generator().manual_seed(length))


def sum_of(tensors: list[Tensor]) -> Callable[..., Tensor]:
    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for tensor in tensors:
            score = score + tensor[q % 4]
        return score

    return mod


@pytest.mark.parametrize("arch", ["apple-paravirtual-device", "apple6", "amd-radeon-pro-5500m"])
def test_a_gpu_without_simdgroup_matrices_is_refused(arch: str) -> None:
    text = reason(replace(PLAIN, arch=arch))
    assert f"{arch!r} is older than Apple's M1, or virtual" in text
    assert "backend='reference'" in text


@pytest.mark.parametrize("arch", ["apple7", "apple10", "apple11", "apple-m6", ""])
def test_every_other_apple_gpu_is_taken(arch: str) -> None:
    assert MpsBackend("mps", "mps").supports(replace(PLAIN, arch=arch)) == Accepted()


UNITS = replace(PLAIN, arch="apple10", dtype=torch.float16, options=(("mpp", True),))


@pytest.mark.parametrize("arch", ["apple10", "apple11", "apple-m6", ""])
def test_matrix_units_are_taken_where_chips_have_them(arch: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        assert option_refusal(replace(UNITS, arch=arch, dtype=dtype)) is None


@pytest.mark.parametrize("arch", ["apple7", "apple9"])
def test_an_option_that_a_chip_cannot_honour_is_refused_and_its_absence_is_not(arch: str) -> None:
    tensors = [query(80).half()] * 3
    with posing("mps", arch=arch):
        for options in ({}, {"mpp": False}):
            out = anyflex.flex_attention(*tensors, kernel_options={"mps": options})
            assert out.isfinite().all()
        for backend in ("mps", None):
            with pytest.raises(ArgumentError) as raised:
                anyflex.flex_attention(
                    *tensors, backend=backend, kernel_options={"mps": {"mpp": True}}
                )
            assert str(raised.value) == (
                "kernel_options['mps']: mpp needs a GPU with matrix units, an M5 or newer, got "
                f"{arch!r}: leave mpp out"
            )


def test_matrix_units_are_refused_in_float32_with_the_cure() -> None:
    cure = "mpp needs query, key and value in float16 or bfloat16, got float32, .*: convert them"
    with posing("mps", arch="apple10"), pytest.raises(ArgumentError, match=cure):
        anyflex.flex_attention(
            query(), query(), query(), backend="mps", kernel_options={"mps": {"mpp": True}}
        )


def test_refusals_of_capabilities_come_first() -> None:
    assert "float64" in reason(replace(PLAIN, dtype=torch.float64))


def test_a_mod_in_float64_is_refused_with_the_cure() -> None:
    def in_float64(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (score.double() * 1.5).float()

    cure = "score_mod computes in float64, which is not supported: convert to another type in it"
    with posing("mps", arch="apple9"), pytest.raises(BackendRefused, match=cure):
        anyflex.flex_attention(query(), query(), query(), score_mod=in_float64, backend="mps")


def test_a_mask_mod_in_float64_is_refused_by_its_name() -> None:
    graph = parse_graph("input i64 - q_idx;cast f64 0 -;const f64 - 3.0;lt bool 1,2 -;=3")
    assert reason(replace(FULLEST, mask_graph=graph)).startswith("mask_mod computes in float64")


@pytest.mark.filterwarnings("ignore::anyflex.PerformanceWarning")
@pytest.mark.parametrize("learned", [False, True])
def test_one_captured_tensor_too_many_is_refused_with_the_cure(learned: bool) -> None:
    # Decoding: q, k, v, partial_out, partial_sums, P, F; backward: q, k, v, dout, rows, P, F and
    # an accumulator for each.
    most = MOST_BUFFERS - 7 if not learned else (MOST_BUFFERS - 7) // 2
    for number in range(1, MOST_BUFFERS + 1):
        tensors = [torch.zeros(4, requires_grad=learned) for _ in range(number)]
        with posing("mps", arch="apple9"):
            found = anyflex.explain(query(), query(), query(), score_mod=sum_of(tensors))
        assert (found.to_dict()["backend"] == "mps") == (number <= most), number
    tensors = [torch.zeros(4, requires_grad=learned) for _ in range(most + 1)]
    with posing("mps", arch="apple9"):
        out = anyflex.flex_attention(
            query(), query(), query(), score_mod=sum_of(tensors[:most]), backend="mps"
        )
        if learned:
            out.square().sum().backward()
    # A number that is added to all scores of a row changes nothing.
    assert all(t.grad is not None and t.grad.abs().max() < 1e-4 for t in tensors[:most] if learned)
    with posing("mps", arch="apple9"), pytest.raises(BackendRefused) as raised:
        anyflex.flex_attention(query(), query(), query(), score_mod=sum_of(tensors), backend="mps")
    message = str(raised.value)
    assert f"mods read {most + 1} captured tensors, {len(tensors) * learned} of which" in message
    assert f"Metal has {MOST_BUFFERS}. Stack tensors of one shape (torch.stack)" in message


@pytest.mark.parametrize("determinism", ["off", "on"])
@pytest.mark.parametrize("q_class", ["short", "long"])
def test_the_fullest_spec_is_refused_from_its_own_count_on(determinism: str, q_class: str) -> None:
    facts = CapturedFacts(torch.float32, 1, True)
    for number in range(12):
        nodes, last = ["input f32 - score", "input i64 - q_idx"], 0
        for i in range(number):
            nodes += [f"load f32 1 {i}", f"add f32 {last},{len(nodes)} -"]
            last = len(nodes) - 1
        graph = parse_graph(";".join([*nodes, f"={last}"]))
        spec = replace(
            FULLEST,
            q_class=q_class,
            score_graph=graph,
            captured=(facts,) * number,
            determinism=determinism,
        )
        count = buffer_count(spec)
        refused = isinstance(MpsBackend("mps", "mps").supports(spec), Rejected)
        assert refused == (count > MOST_BUFFERS)


@pytest.mark.parametrize("q_class", ["short", "long"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_calls_whose_captured_tensors_are_few_need_no_count(
    q_class: str, dtype: torch.dtype
) -> None:
    dense = replace(FULLEST, q_class=q_class, dtype=dtype)
    dense = replace(dense, sinks=True)
    paged = replace(dense, q_layout="packed", kv_layout="paged", page_size=16, gradients=())
    for spec in (dense, paged):
        assert buffer_count(spec) <= OWN_BUFFERS
