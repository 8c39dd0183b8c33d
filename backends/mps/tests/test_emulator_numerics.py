"""Numeric variants: each changes what it says, and nothing else."""

from __future__ import annotations

import pytest
import torch
from emulator import LAYOUTS, Numerics, compile_shader
from emulator.requirement import require_emulator
from matmul_kernel import largest_error
from metal_expressions import HEAD, computed


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    require_emulator()


def ulps(seen: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return how many floats apart two positive tensors are."""
    return (seen.view(torch.int32) - exact.view(torch.int32)).abs()


def test_subnormal_numbers_are_flushed() -> None:
    x = torch.tensor([1e-40, 2e-38])
    expressions = ["x + 0.0f", "x * 0.5f", "x * 1e30f"]
    kept = computed(expressions, x)
    assert (kept > 0).all()
    flushed = computed(expressions, x, numerics=Numerics(flush_denormals=True))
    assert flushed[:, 0].eq(0).all()
    assert flushed[0, 1] == x[1]
    assert flushed[1, 1] == 0
    # The process computes as before.
    assert (x * 0.5 > 0).all()


def test_products_and_sums_contract() -> None:
    x = torch.tensor([1.0 + 2.0**-12])
    expressions = ["x * x - (1.0f + 2.0f * (x - 1.0f))"]
    assert computed(expressions, x).item() == 0
    contracted = computed(expressions, x, numerics=Numerics(contract=True))
    assert contracted.item() == 2.0**-24


def test_fast_mathematics_forgets_nan() -> None:
    x = torch.tensor([float("nan"), float("inf")])
    expressions = ["isnan(x - x)", "x != x"]
    assert computed(expressions, x).tolist() == [[1, 1], [1, 0]]
    assert computed(expressions, x, numerics=Numerics(fast_math=True)).eq(0).all()


@pytest.mark.parametrize("name", ["exp2", "log2", "rsqrt", "sin", "cos", "exp", "tanh"])
@pytest.mark.parametrize("prefix", ["", "fast::", "precise::"])
def test_functions_err_by_some_ulps_at_random(prefix: str, name: str) -> None:
    x = torch.rand(500, generator=torch.Generator().manual_seed(0)) * 0.4 + 1.03
    (exact,) = computed([f"{prefix}{name}(x)"], x)
    (seen,) = computed([f"{prefix}{name}(x)"], x, numerics=Numerics(ulps=4))
    assert set(ulps(seen, exact).tolist()) == {1, 2, 3, 4}
    (again,) = computed([f"{prefix}{name}(x)"], x, numerics=Numerics(ulps=4))
    assert again.equal(seen)
    (other,) = computed([f"{prefix}{name}(x)"], x, numerics=Numerics(ulps=4), seed=1)
    assert not other.equal(seen)


def test_exact_results_stay_exact() -> None:
    x = torch.tensor([0.0, -1.0, 10.0, -torch.inf, torch.inf, torch.nan])
    exact = computed(["exp2(x)", "x + x", "floor(x)", "sqrt(abs(x))", "fma(x, x, x)"], x)
    seen = computed(
        ["exp2(x)", "x + x", "floor(x)", "sqrt(abs(x))", "fma(x, x, x)"],
        x,
        numerics=Numerics(ulps=4),
    )
    assert torch.equal(seen.nan_to_num(nan=-7.0), exact.nan_to_num(nan=-7.0))


PRODUCT = f"""{HEAD}
kernel void product(device const float* A [[buffer(0)]], device const float* B [[buffer(1)]],
    device float* out [[buffer(2)]])
{{
  simdgroup_matrix<float, 8, 8> a;
  simdgroup_matrix<float, 8, 8> b;
  simdgroup_matrix<float, 8, 8> c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(a, A);
  simdgroup_load(b, B);
  simdgroup_multiply_accumulate(c, a, b, c);
  simdgroup_store(c, out);
}}"""


def product(a: torch.Tensor, b: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """Return a matrix product of 8x8 matrices."""
    out = torch.full((8, 8), float("nan"))
    compile_shader(PRODUCT, numerics=numerics).product(a, b, out, threads=32, group_size=32)
    return out


def test_sums_of_matrix_products_run_backwards() -> None:
    a, b = torch.zeros(8, 8), torch.ones(8, 8)
    # 1 is lost beside 2^27 if it comes after it, and isn't if it comes before the two cancel.
    a[0] = torch.tensor([2.0**27, 1.0, -(2.0**27), 0, 0, 0, 0, 1.0])
    assert product(a, b, Numerics())[0].tolist() == [1.0] * 8
    a[0] = torch.tensor([2.0**27, -(2.0**27), 1.0, 0, 0, 0, 0, 1.0])
    assert product(a, b, Numerics())[0].tolist() == [2.0] * 8
    assert product(a, b, Numerics(reversed_sums=True))[0].tolist() == [0.0] * 8


LAYOUT = f"""{HEAD}
kernel void layout(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
    uint lane [[thread_index_in_simdgroup]])
{{
  simdgroup_matrix<float, 8, 8> m;
  simdgroup_load(m, in);
  out[2 * lane] = m.thread_elements()[0];
  out[2 * lane + 1] = m.thread_elements()[1];
}}"""


def elements(layout: str) -> torch.Tensor:
    """Return which elements each lane holds [32, 2]."""
    out = torch.full((32, 2), float("nan"))
    library = compile_shader(LAYOUT, numerics=Numerics(layout=layout))
    library.layout(torch.arange(64.0), out, threads=32, group_size=32)
    return out


def test_another_layout_of_matrices_is_seen_by_their_elements_only() -> None:
    apple, rows = (elements(layout) for layout in LAYOUTS)
    assert sorted(apple.view(-1).tolist()) == list(range(64))
    assert rows.view(-1).tolist() == list(range(64))
    assert not apple.equal(rows)
    assert largest_error(numerics=Numerics(layout="rows")) < 2e-5


@pytest.mark.parametrize("race", [False, True])
def test_a_tiled_product_holds_its_budget_in_each_variant(race: bool) -> None:
    for numerics in (
        Numerics(flush_denormals=True),
        Numerics(contract=True),
        Numerics(ulps=4),
        Numerics(reversed_sums=True),
        Numerics(True, True, True, 4, True, "rows"),
    ):
        assert largest_error(numerics=numerics, race=race) < 2e-5
