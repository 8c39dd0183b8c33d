"""Self test of matrix units: right ones pass in any layout, others are refused with a line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulator import KernelFault, compile_shader
from emulator.lint import conversions, findings
from matrix_units import Shuffled
from tensor_kernel import BARRIER, shuffled

import anyflex
from anyflex.plugin import ArgumentError, isolated, register
from anyflex.testing import posing
from anyflex_mps.dump import SPECS
from anyflex_mps.forward_matmul import Products, forward_matmul_shader, products_of
from anyflex_mps.matmul_test import _integers, broken_products, matmul_test_shader
from anyflex_mps.options import wants_mpp
from anyflex_mps.self_test import SelfTest
from anyflex_mps.shaders import CompileShader, Shaders

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16]
PRODUCTS = [Products(32, 64, 48), Products(32, 16, 16), Products(16, 256, 256)]
PRODUCT = "a product of tensors, 32 x 32 of 64"
SUM = "a float32 sum of products of tensors, 32 x 48 of 32"


def broken(
    dtype: torch.dtype, compiler: CompileShader, products: Products = PRODUCTS[0]
) -> list[str]:
    kernel = Shaders(compiler).kernel(matmul_test_shader(dtype, products))
    return broken_products(kernel, dtype, CPU, products)


def seeded(old: str, new: str) -> CompileShader:
    """Return a compiler that makes something else of a piece of the source, where it is there."""
    return lambda source: shuffled(source.replace(old, new))


@pytest.mark.parametrize("dtype", DTYPES)
def test_its_source_keeps_the_rules(dtype: torch.dtype) -> None:
    text = matmul_test_shader(dtype, PRODUCTS[2]).text
    assert findings(text) == [] and conversions(text) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("race", [False, True])
def test_right_units_pass(dtype: torch.dtype, race: bool) -> None:
    for products in PRODUCTS:
        assert broken(dtype, lambda source: shuffled(source, race=race), products) == []


def test_products_are_those_of_the_kernel() -> None:
    for name, spec in SPECS.items():
        if wants_mpp(spec):
            own = forward_matmul_shader(spec)
            tested = matmul_test_shader(spec.dtype, products_of(spec))
            sizes = [re.findall(r"descriptor\((.*)", shader.text) for shader in (own, tested)]
            assert len(sizes[0]) == 2 and sizes[0] == sizes[1], name
            assert own.threads == tested.threads


@pytest.mark.parametrize(
    ("rows", "columns", "of"), [(32, 256, 257), (16, 256, 263), (32, 32, 37), (32, 256, 269)]
)
def test_rows_and_columns_of_its_operands_all_differ(rows: int, columns: int, of: int) -> None:
    made = _integers(rows, columns, of)
    assert made.unique(dim=0).shape[0] == rows and made.unique(dim=1).shape[1] == columns


@pytest.mark.parametrize("removed", range(3))
def test_each_barrier_is_needed(removed: int) -> None:
    def compiler(source: str) -> Any:
        pieces = source.split(BARRIER)
        assert len(pieces) == 4 == source.count("barrier(") + 1
        pieces[removed : removed + 2] = ["".join(pieces[removed : removed + 2])]
        return shuffled(BARRIER.join(pieces), race=True)

    with pytest.raises(KernelFault, match="matmul_test: data race on threadgroup memory"):
        broken(torch.float16, compiler)


STORED = "+ column] = acc[i];"
BREACHES = [
    ("tile_row * 32 + column", "column * 32 + tile_row", PRODUCT),
    ("mode::multiply_accumulate", "mode::multiply", SUM),
    ("= s[i];", "= (float)(half)(s[i] + 1024.25f) - 1024.25f;", PRODUCT),
    (STORED, STORED.replace("acc[i]", "(float)(bfloat)acc[i]"), SUM),
    ("acc[i] = F[0];", "acc[i] = as_type<float>(as_type<uint>(F[0]) & ~0x1fffu);", SUM),
]


@pytest.mark.parametrize(("old", "new", "name"), BREACHES)
def test_each_broken_assumption_is_named(old: str, new: str, name: str) -> None:
    assert broken(torch.float16, seeded(old, new)) == [name]


@pytest.fixture
def registry() -> Iterator[None]:
    with isolated(), posing("mps", arch="apple10"):
        yield


def attention(*, mpp: bool, dim: int = 16) -> torch.Tensor:
    query = torch.randn(1, 1, 80, dim, generator=torch.Generator().manual_seed(0)).half()
    return anyflex.flex_attention(
        query, query, query, backend="mps", kernel_options={"mps": {"mpp": mpp}}
    )


class Rounding(Shuffled):
    """Backend of a GPU whose units sum in fewer bits."""

    def compile_shader(self) -> CompileShader:
        return seeded(STORED, STORED.replace("acc[i]", "(float)(half)acc[i]"))


class Narrow(Shuffled):
    """Backend of a GPU whose units are wrong past 128 columns."""

    def compile_shader(self) -> CompileShader:
        return seeded(STORED, "+ column] = column < 128 ? acc[i] : 0.0f;")


class Older(Shuffled):
    """Backend of a system that lacks the headers."""

    def compile_shader(self) -> CompileShader:
        def compiler(source: str) -> Any:
            if "MetalPerformancePrimitives" in source:
                raise SyntaxError("program_source:3:10: fatal error: file not found")
            return compile_shader(source)

        return compiler


@pytest.mark.parametrize(
    ("backend", "says"),
    [
        (Rounding, "a float32 sum of products of tensors, 32 x 16 of 32"),
        (Older, "fatal error: file not found"),
    ],
)
def test_a_call_with_the_option_is_refused_and_one_without_is_not(
    registry: None, backend: type[Shuffled], says: str
) -> None:
    register("mps", backend)
    for _ in range(2):
        with pytest.raises(ArgumentError) as raised:
            attention(mpp=True)
        message = str(raised.value)
        assert "self test of mpp with float16 fails on this machine" in message
        assert says in message
        assert "mpp needs macOS 26.2 or newer" in message
        assert message.endswith("leave mpp out meanwhile")
    assert attention(mpp=False).isfinite().all()


def test_sizes_that_units_compute_right_are_taken_and_others_refused(registry: None) -> None:
    register("mps", Narrow)
    assert attention(mpp=True).isfinite().all()
    with pytest.raises(ArgumentError, match="sum of products of tensors, 32 x 256 of 16"):
        attention(mpp=True, dim=256)


def test_each_dtype_and_product_is_tried_once_beside_the_other_test() -> None:
    compiled = []

    def compiler(source: str) -> Any:
        compiled.append(source)
        return shuffled(source)

    test = SelfTest(compiler, CPU)
    for _ in range(2):
        for dtype in DTYPES:
            test.check(dtype)
            for products in PRODUCTS[:2]:
                test.check_matrix_units(dtype, products)
    assert len(compiled) == len(set(compiled)) == 6
