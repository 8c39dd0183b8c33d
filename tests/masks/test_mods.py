"""Each ready-made score mod has the values and gradients of its published formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import anyflex
from anyflex import mods
from anyflex.testing.oracle import dense_attention, dense_mask
from anyflex.testing.results import Forward, Results, gradients
from anyflex.tracing.trace_cache import traced
from tests.masks.mod_cases import MOD_CASES, SIZES, t5_bucket
from tests.oracles.differences import differences
from tests.soak import SOAK

__all__: list[str] = []


def tensors(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(2, 4, SIZES.q_length, 8), (2, 2, SIZES.kv_length, 8), (2, 2, SIZES.kv_length, 6)]
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def learned_tensors(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        leaf: torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        for leaf, shape in MOD_CASES[name].learned.items()
    }


@pytest.mark.parametrize("name", MOD_CASES)
@pytest.mark.usefixtures("float64_numbers")
def test_a_mod_has_the_values_and_gradients_of_its_formula(name: str) -> None:
    case = MOD_CASES[name]
    query, key, value = tensors(torch.float64)
    learned = learned_tensors(name, torch.float64)
    inputs = {"dq": query, "dk": key, "dv": value, **learned}
    generator = torch.Generator().manual_seed(4)
    dout = torch.randn((2, 4, SIZES.q_length, 6), generator=generator)
    dlse = torch.randn((2, 4, SIZES.q_length), generator=generator)
    mask_mod = anyflex.masks.sliding_window(9, 5)
    live = dense_mask(mask_mod, 1, 1, SIZES.q_length, SIZES.kv_length)

    forward = dense_attention(query, key, value, case.formula(learned), live)
    wanted = Results(forward, gradients(forward, inputs, dout, dlse, missing_is_zero=True))

    mask = anyflex.create_block_mask(mask_mod, 1, 1, SIZES.q_length, SIZES.kv_length, BLOCK_SIZE=8)
    out, aux = anyflex.flex_attention(
        query,
        key,
        value,
        case.make(*learned.values()),
        mask,
        enable_gqa=True,
        return_aux=anyflex.AuxRequest(lse=True, max_scores=True),
    )
    forward = Forward(out, aux.lse, aux.max_scores)
    found = Results(forward, gradients(forward, inputs, dout, dlse, missing_is_zero=False))
    assert differences(found, wanted, tolerance=case.tolerance) == []


@pytest.mark.parametrize("name", list(MOD_CASES)[:: 1 if SOAK else 6])
def test_a_mod_that_is_made_inside_of_a_compiled_function(name: str) -> None:
    case = MOD_CASES[name]
    learned = learned_tensors(name, torch.float32)
    inputs = [*tensors(torch.float32), *learned.values()]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        score_mod = case.make(*learned.values())
        return anyflex.flex_attention(query, key, value, score_mod, enable_gqa=True)

    wanted = attend(*inputs[:3])
    wanted_grads = torch.autograd.grad(wanted.square().sum(), inputs)
    torch._dynamo.reset()
    found = torch.compile(attend, backend="eager", fullgraph=True)(*inputs[:3])
    grads = torch.autograd.grad(found.square().sum(), inputs)
    for a, b in zip([found, *grads], [wanted, *wanted_grads], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (mods.softcap, [20.0, 30.0, 40.0]),
        (lambda cap: mods.softcap(cap, approximate=True), [20.0, 30.0, 40.0, 50.0]),
        (lambda offset: mods.alibi(4, offset=offset), [0, 1, 2, 3]),
        (lambda offset: mods.relative_bias(torch.ones(5, 4), offset), [4, 5, 6, 7]),
    ][:: 1 if SOAK else 2],
)
def test_a_number_that_changes_compiles_twice(
    make: Callable[..., Any], numbers: list[Any]
) -> None:
    query, key, value = tensors(torch.float32)
    torch._dynamo.reset()
    graphs = CompileCounter()

    def attend(number: float) -> Tensor:
        return anyflex.flex_attention(query, key, value, make(number), enable_gqa=True)

    compiled = torch.compile(attend, backend=graphs, fullgraph=True)
    for number in numbers:
        torch.testing.assert_close(compiled(number), attend(number))
    assert graphs.frame_count == 2


@pytest.mark.parametrize("name", MOD_CASES)
def test_a_mod_is_traced_once(name: str) -> None:
    score_mod = MOD_CASES[name].make(*learned_tensors(name, torch.float32).values())
    first, second = (
        traced(score_mod, "score", torch.float32, torch.device("cpu")) for _ in range(2)
    )
    assert not first.depends_on_facts
    assert first.text is second.text


def test_caps_share_one_structure() -> None:
    for approximate in (False, True):
        texts = {
            traced(
                mods.softcap(cap, approximate), "score", torch.float32, torch.device("cpu")
            ).text
            for cap in (20.0, 30.0, 50)
        }
        assert len(texts) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_fast_tanh_is_as_near_as_it_says(dtype: torch.dtype) -> None:
    x = torch.linspace(-20, 20, 1_000_001, dtype=dtype).requires_grad_()
    index = torch.tensor(0)
    result = mods.softcap(1.0, approximate=True)(x, index, index, index, index)
    (slope,) = torch.autograd.grad(result.sum(), x)
    exact = x.detach().double()
    assert (result.double() - exact.tanh()).abs().max() <= 1.2e-6
    assert (slope.double() - exact.cosh() ** -2).abs().max() <= 1.2e-5
    assert result.abs().max() <= 1
    assert bool((result.diff() >= -1e-6).all())


def test_the_fast_tanh_keeps_infinities_and_nan() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan])
    index = torch.tensor(0)
    result = mods.softcap(3.0, approximate=True)(x, index, index, index, index)
    torch.testing.assert_close(result, torch.tensor([3.0, -3.0, math.nan]), equal_nan=True)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (8, [2**-i for i in range(1, 9)]),
        (12, [2**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
        (16, [2 ** (-i / 2) for i in range(1, 17)]),
    ],
)
def test_the_published_slopes(heads: int, slopes: list[float]) -> None:
    torch.testing.assert_close(mods.alibi_slopes(heads), torch.tensor(slopes))


@pytest.mark.parametrize(
    ("buckets", "max_distance", "bidirectional"),
    [
        (32, 128, True),
        (32, 128, False),
        (64, 256, True),
        (32, 20, False),
        (12, 1000, True),
        (4, 3, True),
        (4, 3, False),
        (2, 16, False),
    ],
)
def test_the_buckets_of_t5(buckets: int, max_distance: int, bidirectional: bool) -> None:
    table = mods.t5_buckets(buckets, max_distance, bidirectional)
    distances = range(-max_distance, max_distance + 1)
    assert table.dtype == torch.int32
    assert table.tolist() == [
        t5_bucket(distance, buckets, max_distance, bidirectional) for distance in distances
    ]
    # Beyond the table nothing changes any more.
    for distance in (max_distance, -max_distance):
        assert t5_bucket(distance, buckets, max_distance, bidirectional) == t5_bucket(
            3 * distance, buckets, max_distance, bidirectional
        )


def test_t5_against_numbers_by_hand() -> None:
    # 32 buckets, 128 places: 8 exact ones, then 8 for 8..127 growing by sqrt(2), on each side.
    table = mods.t5_buckets(32, 128)
    wanted = {0: 0, -1: 1, -7: 7, -8: 8, -11: 8, -12: 9, -16: 10, -64: 14, -91: 15, -128: 15}
    wanted |= {1: 17, 7: 23, 8: 24, 128: 31}
    assert {d: int(table[128 + d]) for d in wanted} == wanted


def test_a_mod_that_was_made_without_gradients_still_learns() -> None:
    bias = torch.zeros(1, 1, 4, 4, requires_grad=True)
    with torch.no_grad():
        score_mod = mods.dense_bias(bias)
    q = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        anyflex.flex_attention(q, q, q, score_mod).square().sum().backward()
    assert bias.grad is not None and bias.grad.any()
