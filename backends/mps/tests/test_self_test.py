"""Self test: right devices pass; one that breaks an assumption is refused with a report line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from emulated_backend import Emulated
from emulator import Numerics, compile_shader
from emulator.lint import conversions, findings

import anyflex
from anyflex.plugin import BackendRefused, isolated, register
from anyflex.testing import posing
from anyflex_mps.self_test import SelfTest, broken_assumptions, self_test_shader
from anyflex_mps.shaders import CompileShader, Shaders

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

TOLERATED = [
    Numerics(),
    Numerics(flush_denormals=True),
    Numerics(ulps=4),
    Numerics(reversed_sums=True),
]
MATRICES = ["the lanes of an 8x8 matrix", "the lanes of a transposed 8x8 matrix"]


def broken(dtype: torch.dtype, compiler: CompileShader) -> list[str]:
    kernel = Shaders(compiler).kernel(self_test_shader(dtype))
    return broken_assumptions(kernel, dtype, CPU)


def seeded(old: str, new: str) -> CompileShader:
    """Return a compiler that makes something else of a piece of the source."""

    def compiler(source: str) -> Any:
        assert source.count(old) == 1, old
        return compile_shader(source.replace(old, new))

    return compiler


@pytest.mark.parametrize("dtype", DTYPES)
def test_its_source_keeps_the_rules(dtype: torch.dtype) -> None:
    text = self_test_shader(dtype).text
    assert findings(text) == [] and conversions(text) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numerics", TOLERATED, ids=repr)
@pytest.mark.parametrize("race", [False, True])
def test_what_kernels_tolerate_passes(dtype: torch.dtype, numerics: Numerics, race: bool) -> None:
    assert broken(dtype, partial(compile_shader, race=race, numerics=numerics)) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_layout_of_lanes_is_found(dtype: torch.dtype) -> None:
    found = broken(dtype, partial(compile_shader, numerics=Numerics(layout="rows")))
    assert found == [*MATRICES, "a product of 8x8 matrices"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_contraction_is_found(dtype: torch.dtype) -> None:
    found = broken(dtype, partial(compile_shader, numerics=Numerics(contract=True)))
    assert found == ["separate rounding of products and sums"]


BREACHES = [
    ("isnan(infinity - infinity)", "isnan(0.0f)", "infinities and NaN"),
    ("isnan(nan)", "false", "infinities and NaN"),
    ("!isfinite(infinity)", "false", "infinities and NaN"),
    # A compiler that assumes that there is no NaN turns comparisons around.
    ("nan >= 1.0f", "!(nan < 1.0f)", "comparisons with NaN"),
    ("nan == nan", "true", "comparisons with NaN"),
    ("F[3] * F[3] - F[4]", "fma(F[3], F[3], -F[4])", "separate rounding of products and sums"),
    ("fast::exp2(-infinity)", "fast::exp2(-20.0f)", "fast::exp2 of -inf and 0"),
    ("fast::exp2(F[0] - F[0])", "nan", "fast::exp2 of -inf and 0"),
    ("simd_shuffle_xor(high, (ushort)8)", "high", "the largest element of a row"),
    ("simd_shuffle_xor(high, (ushort)1)", "high", "the largest element of a row"),
    ("simd_shuffle(x,", "simd_shuffle_xor(x,", "elements of other lanes"),
    ("P[0] >> 32", "(long)(int)P[0] >> 32", "integers and floats of a call"),
    ("= F[0];", "= F[0] + 1.0f;", "integers and floats of a call"),
    ("simdgroup_multiply_accumulate(s, a, b, s)", "simdgroup_multiply(s, a, b)", "a product of"),
    ("(turned, index_rows, 8, ulong2(0), true", "(turned, index_rows, 8", MATRICES[1]),
]


@pytest.mark.parametrize(("old", "new", "name"), BREACHES, ids=lambda text: text[:24])
def test_each_broken_assumption_is_named(old: str, new: str, name: str) -> None:
    found = broken(torch.float32, seeded(old, new))
    assert len(found) == 1 and found[0].startswith(name)


def test_simdgroups_of_another_size_are_found() -> None:
    kernel = Shaders(compile_shader).kernel(self_test_shader(torch.float32))
    kernel.thread_execution_width = 64
    assert broken_assumptions(kernel, torch.float32, CPU) == ["32 lanes in a simdgroup"]


def test_a_source_that_the_compiler_refuses_is_a_refusal_with_its_message() -> None:
    def compiler(source: str) -> Any:
        raise SyntaxError("program_source:3: error: unknown pragma\nmore")

    test = SelfTest(compiler, CPU)
    with pytest.raises(BackendRefused) as raised:
        test.check(torch.float32)
    message = str(raised.value)
    assert "\n" not in message
    assert "self test of float32 fails on this machine" in message
    assert "program_source:3: error: unknown pragma" in message and ".metal" in message


def test_each_dtype_is_tried_once_by_however_many_threads() -> None:
    compiled = []

    def compiler(source: str) -> Any:
        compiled.append(source)
        return compile_shader(source)

    test = SelfTest(compiler, CPU)
    threads = [threading.Thread(target=test.check, args=(torch.float16,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    test.check(torch.bfloat16)
    assert len(compiled) == 2


class Reordered(Emulated):
    """Backend of a GPU that lays matrices out otherwise."""

    def compile_shader(self) -> CompileShader:
        return partial(compile_shader, numerics=Numerics(layout="rows"))


@pytest.fixture
def registry() -> Iterator[None]:
    with isolated():
        yield


def query() -> torch.Tensor:
    return torch.randn(1, 1, 80, 16, generator=torch.Generator().manual_seed(0))


def test_a_call_that_forces_the_backend_is_refused_with_a_line_to_report(registry: None) -> None:
    register("mps", Reordered)
    for _ in range(2):
        with posing("mps", arch="apple9"), pytest.raises(BackendRefused) as raised:
            anyflex.flex_attention(query(), query(), query(), backend="mps")
        message = str(raised.value)
        assert "wrong numbers: the lanes of an 8x8 matrix; " in message
        assert "Please report this line, and use backend='reference' meanwhile" in message


def test_a_call_that_forces_none_falls_back_to_right_numbers(registry: None) -> None:
    register("mps", Reordered)
    with posing("mps", arch="apple9"), pytest.warns(anyflex.PerformanceWarning, match="self test"):
        out = anyflex.flex_attention(query(), query(), query())
    expected = torch.nn.functional.scaled_dot_product_attention(*[query().double()] * 3)
    assert (out - expected).abs().max() < 1e-5


def test_a_gpu_that_passes_computes(registry: None) -> None:
    register("mps", Emulated)
    with posing("mps", arch="apple9"):
        out = anyflex.flex_attention(query(), query(), query(), backend="mps")
    expected = torch.nn.functional.scaled_dot_product_attention(*[query().double()] * 3)
    assert (out - expected).abs().max() < 1e-5


def test_doctor_is_told_how_the_test_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M4 Pro")
    chip, end = Emulated("mps", "mps").notes()
    assert chip.startswith("Apple M4 Pro, ") and chip.endswith(", 8 cores")
    assert end == "self test passed: the kernels' assumptions hold on this GPU"
    _, *failures = Reordered("mps", "mps").notes()
    assert len(failures) == len(DTYPES)
    assert all("the lanes of an 8x8 matrix" in failure for failure in failures)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has an Apple GPU")
def test_without_a_gpu_doctor_is_told_nothing() -> None:
    assert list(Emulated("mps", "mps").notes()) == []
