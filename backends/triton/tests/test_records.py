"""Records in kernels: the fields that they take, and constants that stay constants."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch
import triton
import triton.language as tl

from anyflex_triton.records import record


@record
class Scaled:
    values: Any
    factor: Any
    COUNT: Any


@triton.jit
def doubled(scaled):
    """Construct another `Scaled`, because records can't be changed."""
    return Scaled(values=scaled.values * scaled.factor, factor=scaled.factor, COUNT=scaled.COUNT)


@triton.jit
def power_kernel(source, target, factor, times, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    scaled = Scaled(values=tl.load(source + places), factor=factor, COUNT=COUNT)
    for _ in range(times):
        scaled = doubled(scaled)
    COLUMNS: tl.constexpr = scaled.COUNT
    tl.store(target + tl.arange(0, COLUMNS), scaled.values)


def test_a_record_passes_through_a_loop_and_a_function() -> None:
    source = torch.arange(16, dtype=torch.float32)
    target = torch.full_like(source, torch.nan)
    power_kernel[(1,)](source, target, 2.0, 3, COUNT=16)
    torch.testing.assert_close(target, source * 8, rtol=0, atol=0)


@pytest.mark.parametrize("fields", [("values", "factor"), ("values", "factor", "COUNT", "more")])
def test_a_record_takes_all_its_fields_and_no_others(fields: tuple[str, ...]) -> None:
    plain: Any = Scaled.plain  # type: ignore[attr-defined]
    with pytest.raises(
        TypeError, match=f"fields of Scaled: .*{'more' if len(fields) > 3 else 'COUNT'}"
    ):
        plain(**dict.fromkeys(fields, 1))


@record
class Shifted:
    values: Any
    shift: Any = None


@triton.jit
def shift_kernel(source, target, shift, SHIFTS: tl.constexpr):
    places = tl.arange(0, 16)
    values = tl.load(source + places)
    shifted = Shifted(values=values, shift=shift) if SHIFTS else Shifted(values=values)
    if shifted.shift is not None:
        tl.store(target + places, shifted.values + shifted.shift)
    else:
        tl.store(target + places, shifted.values)


@pytest.mark.parametrize("shifts", [False, True])
def test_a_field_that_is_not_given_has_the_value_of_the_class(shifts: bool) -> None:
    source = torch.arange(16, dtype=torch.float32)
    target = torch.full_like(source, torch.nan)
    shift_kernel[(1,)](source, target, 3.0, SHIFTS=shifts)
    torch.testing.assert_close(target, source + 3 * shifts, rtol=0, atol=0)
    assert Shifted.plain(values=1).shift is None  # type: ignore[attr-defined]
