"""Refused spellings are reported with their line and the cure, or run on the reference."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.errors import ModTraceError
from anyflex.testing.oracle import dense_attention
from anyflex.tracing.trace import trace_mod
from tests.spellings.refused import PURE, REFUSED, Refusal
from tests.spellings.surroundings import function_of, tables

__all__: list[str] = []

COUNT = 85
RAW = 74  # torch.ops.aten.sin(s)


def test_the_list_is_complete() -> None:
    numbers = [refusal.number for refusal in REFUSED] + list(PURE) + [RAW]
    assert sorted(numbers) == list(range(1, COUNT + 1))


@pytest.mark.parametrize("refusal", REFUSED, ids=str)
def test_a_refusal_names_the_operation_the_line_and_the_cure(refusal: Refusal) -> None:
    captured = tables(torch.float32)
    before = {name: value.clone() for name, value in captured.items() if name != "np_table"}
    mod = function_of(refusal.expression, captured)
    with pytest.raises(ModTraceError) as caught:
        trace_mod(mod, "score")
    message = str(caught.value)
    for name in refusal.names:
        assert re.search(name, message), f"{name!r} is not in: {message}"
    assert caught.value.operation
    assert not caught.value.pure
    for name, value in before.items():
        assert torch.equal(captured[name], value)


@pytest.mark.parametrize("number", PURE)
def test_an_unknown_pure_operation_runs_on_the_reference(number: int) -> None:
    expression, operation = PURE[number]
    mod = function_of(expression.replace("(s", "(0.5 * s"), tables(torch.float32))
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn((1, 1, 7, 4), generator=generator) for _ in range(3))
    with pytest.warns(anyflex.PerformanceWarning, match=operation):
        out = anyflex.flex_attention(query, key, value, mod)
    wanted = dense_attention(query.double(), key.double(), value.double(), mod).out
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.filterwarnings("ignore::anyflex.PerformanceWarning")
def test_a_raw_aten_call_means_what_its_function_means() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn((1, 1, 7, 4), generator=generator) for _ in range(3))
    raw, named = (
        anyflex.flex_attention(query, key, value, function_of(expression, {}))
        for expression in ("torch.ops.aten.sin(s)", "torch.sin(s)")
    )
    torch.testing.assert_close(raw, named)


def test_a_symbol_may_be_printed() -> None:
    seen: list[str] = []

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        seen.append(repr(s))
        seen.append(f"{q - k}")
        return s

    trace_mod(mod, "score")
    assert seen == ["<f32 symbol %4>", "<i64 symbol %5>"]


def test_numbers_alone_are_python() -> None:
    window, table = 100, torch.arange(8.0)

    def mod(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        reach = min(window, 64) if window > 1 else max(window, 1)
        return s + sum(table[i] * i for i in range(3)) + (q - k < reach)

    assert trace_mod(mod, "score").ints[-1] == 64


U8, I8, I32 = (torch.arange(7, dtype=t) for t in (torch.uint8, torch.int8, torch.int32))


@pytest.mark.parametrize(
    "expression",
    [
        *(f"u8[q].clamp({bound})" for bound in ("min=256", "max=-300", "300, 400", "256, 3")),
        "torch.clamp_min(i8[q], 128)",
        "i8[q].clamp_max(-129)",
        "i32[q].clip(1 << 40)",
        "torch.where(q > k, u8[q], 300)",
        "torch.where(q > k, 300, u8[q])",
        "u8[q].where(q > k, -256)",
        "i8[q].masked_fill(q > k, 128)",
        "i8[q].masked_fill(q > k, float('inf'))",
        "torch.full_like(u8[q], 300)",
        "u8[q] ** 256",
        "i8[q] ** 128",
        "torch.pow(i32[q], 1 << 31)",
    ],
)
def test_a_number_that_the_type_cannot_hold_is_refused_as_torch_refuses_it(
    expression: str,
) -> None:
    mod = function_of(f"s + {expression}", {"u8": U8, "i8": I8, "i32": I32})
    zero = torch.zeros((), dtype=torch.int64)
    with pytest.raises(RuntimeError, match="without overflow|outside the representable"):
        mod(zero.float(), zero, zero, zero, zero)
    with pytest.raises(ModTraceError, match=r"can't hold.*`x.long\(\)`"):
        trace_mod(mod, "score")


@pytest.mark.parametrize(
    "expression",
    [
        "u8[q] // 256",
        "u8[q] % -256",
        "i8[q] % 768",
        "torch.fmod(i8[q], -512)",
        "torch.div(i32[q], 1 << 32, rounding_mode='trunc')",
        "torch.div(i32[q], 3 << 32, rounding_mode='floor')",
    ],
)
def test_a_divisor_that_is_0_in_the_type_is_refused_as_torch_refuses_it(expression: str) -> None:
    mod = function_of(f"s + {expression}", {"u8": U8, "i8": I8, "i32": I32})
    zero = torch.zeros((), dtype=torch.int64)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        mod(zero.float(), zero, zero, zero, zero)
    with pytest.raises(ModTraceError, match=r"which is 0 in that type.*`x.long\(\)`"):
        trace_mod(mod, "score")


@pytest.mark.parametrize(
    "expression",
    [
        "u8[k].clamp(max=255)",
        "u8[k].clamp(min=-1)",  # 255 before torch 2.15
        "u8[k].clamp(-255, 200)",
        "i8[k].clamp(-128, 127)",
        "(i8[k] - 3).clamp(-1, 2)",
        "u8[k].clamp(max=300.0)",  # a float now
        "u8[k].masked_fill(q > k, -2)",
        "torch.where(q > k, 255, u8[k])",
        "u8[k] + 300",
        "u8[k] * 300",
        "u8[k] % 300",
        "i8[k] // 384",
        "300 ** u8[k]",
    ],
)
def test_a_number_that_torch_accepts_means_what_it_means_there(expression: str) -> None:
    """The log-sum-exp shows shifts of a whole row, which leave `out` unchanged."""
    mod = function_of(f"s + {expression}", {"u8": U8, "i8": I8, "i32": I32})
    query, key, value = (torch.randn(1, 1, 7, 4) for _ in range(3))
    wanted = dense_attention(query.double(), key.double(), value.double(), mod)
    out, aux = anyflex.flex_attention(
        query, key, value, mod, return_aux=anyflex.AuxRequest(lse=True)
    )
    # A float32 score of some 300 is rounded to steps of 3e-5, and weights by as much of each.
    torch.testing.assert_close(out.double(), wanted.out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(aux.lse.double(), wanted.lse, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize(
    "expression",
    [
        *(f"u8[q].clamp({bound})" for bound in ("max=300", "min=-256", "-1, 300", "max=-1")),
        "torch.clamp_max(i8[q], 128)",
        "(i8[q] - 3).clamp_min(-129)",
        "(i32[q] - 3).clip(-(1 << 40), 2)",
        "u8[q].clamp(-300, 300)",
    ],
)
def test_a_clamp_beyond_an_integer_type_is_what_the_torch_that_runs_makes_of_it(
    expression: str,
) -> None:
    """torch 2.15 takes bounds that change nothing, and refuses some that wrapped before."""
    mod = function_of(f"s + {expression}", {"u8": U8, "i8": I8, "i32": I32})
    query, key, value = (torch.randn(1, 1, 7, 4) for _ in range(3))
    try:
        wanted = dense_attention(query.double(), key.double(), value.double(), mod)
    except RuntimeError as error:
        assert "overflow" in str(error) or "representable" in str(error)
        with pytest.raises(ModTraceError, match=r"can't hold.*`x.long\(\)`"):
            trace_mod(mod, "score")
        return
    out = anyflex.flex_attention(query, key, value, mod)
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out.double(), wanted.out, rtol=1e-5, atol=1e-5)
