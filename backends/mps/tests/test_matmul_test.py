"""Self test of matrix units: right ones pass in any layout, others are refused with a line."""

from __future__ import annotations

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
from anyflex_mps.matmul_test import _integers, broken_products, matmul_test_shader
from anyflex_mps.self_test import SelfTest
from anyflex_mps.shaders import CompileShader, Shaders

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16]
PRODUCT, SUM = "a product of tensors", "a float32 sum of products of tensors"


def broken(dtype: torch.dtype, compiler: CompileShader) -> list[str]:
    kernel = Shaders(compiler).kernel(matmul_test_shader(dtype))
    return broken_products(kernel, dtype, CPU)


def seeded(old: str, new: str) -> CompileShader:
    """Return a compiler that makes something else of a piece of the source, where it is there."""
    return lambda source: shuffled(source.replace(old, new))


@pytest.mark.parametrize("dtype", DTYPES)
def test_its_source_keeps_the_rules(dtype: torch.dtype) -> None:
    text = matmul_test_shader(dtype).text
    assert findings(text) == [] and conversions(text) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("race", [False, True])
def test_right_units_pass(dtype: torch.dtype, race: bool) -> None:
    assert broken(dtype, lambda source: shuffled(source, race=race)) == []


@pytest.mark.parametrize(("rows", "columns", "of"), [(32, 64, 67), (32, 32, 37), (32, 48, 53)])
def test_rows_and_columns_of_its_operands_all_differ(rows: int, columns: int, of: int) -> None:
    made = _integers(rows, columns, of)
    assert made.unique(dim=0).shape[0] == rows and made.unique(dim=1).shape[1] == columns


def test_its_barrier_is_needed() -> None:
    text = matmul_test_shader(torch.float16).text
    assert text.count(BARRIER) == text.count("barrier(") == 1
    with pytest.raises(KernelFault, match="matmul_test: data race on threadgroup memory"):
        broken(torch.float16, lambda source: shuffled(source.replace(BARRIER, ""), race=True))


STORED = "sum[tile_row * 48 + column] = acc[i];"
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


def attention(*, mpp: bool) -> torch.Tensor:
    query = torch.randn(1, 1, 80, 16, generator=torch.Generator().manual_seed(0)).half()
    return anyflex.flex_attention(
        query, query, query, backend="mps", kernel_options={"mps": {"mpp": mpp}}
    )


class Rounding(Shuffled):
    """Backend of a GPU whose units sum in fewer bits."""

    def compile_shader(self) -> CompileShader:
        return seeded(STORED, STORED.replace("acc[i]", "(float)(half)acc[i]"))


class Older(Shuffled):
    """Backend of a system that lacks the headers."""

    def compile_shader(self) -> CompileShader:
        def compiler(source: str) -> Any:
            if "MetalPerformancePrimitives" in source:
                raise SyntaxError("program_source:3:10: fatal error: file not found")
            return compile_shader(source)

        return compiler


@pytest.mark.parametrize(
    ("backend", "says"), [(Rounding, SUM), (Older, "fatal error: file not found")]
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


def test_each_dtype_is_tried_once_beside_the_other_test() -> None:
    compiled = []

    def compiler(source: str) -> Any:
        compiled.append(source)
        return shuffled(source)

    test = SelfTest(compiler, CPU)
    for _ in range(2):
        for dtype in DTYPES:
            test.check(dtype)
            test.check_matrix_units(dtype)
    assert len(compiled) == len(set(compiled)) == 4
