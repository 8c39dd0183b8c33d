"""Integers divided by constants at the ends of their type and beyond: a constant wraps as in
torch, in compiled and interpreted mods and in the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "floordiv": lambda x, y: x // y,
    "mod": lambda x, y: x % y,
    "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "fmod": torch.fmod,
}
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
WAYS: dict[str, dict[str, Any]] = {
    "jit": {"backend": "cpu", "kernel_options": {"cpu": {"mods": "jit"}}},
    "interpreter": {"backend": "cpu", "kernel_options": {"cpu": {"mods": "interpreter"}}},
    "reference": {"backend": "reference"},
}


def constants(dtype: torch.dtype) -> list[int]:
    bits = torch.iinfo(dtype).bits
    half, whole = 1 << (bits - 1), 1 << bits
    sizes = {1, 2, half // 2, whole, 3 * half, 2 * whole, whole + half // 2}
    sizes |= {end + step for end in (half, whole) for step in (-1, 0, 1)}
    found = sorted({sign * size for size in sizes for sign in (1, -1)})
    if bits == 64:
        found = [number for number in found if -half <= number < half]
    return [number for number in found if number % whole]  # without those that wrap to 0


def values(dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    numbers = [limits.min, limits.min + 1, limits.min // 2, 0, 1, 2, 3, 100, limits.max // 2]
    numbers += [limits.max - 1, limits.max, *([-1, -2, -3, -100] if limits.min else [])]
    return torch.tensor(numbers, dtype=dtype)


def by_torch(operation: str, table: Tensor, number: int) -> Tensor:
    if operation == "trunc" and (number + 1) % (1 << torch.iinfo(table.dtype).bits) == 0:
        return -table if table.dtype is not torch.uint8 else table // 255  # torch traps for -1
    return OPERATIONS[operation](table, number)


@pytest.mark.parametrize("index", ["kv_idx", "q_idx"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_a_division_by_a_constant_is_torch_s(
    dtype: torch.dtype, operation: str, way: str, index: str
) -> None:
    if way == "jit":
        pytest.importorskip("llvmlite", reason="mods are compiled by llvmlite, the extra `jit`")
    table, divisors = values(dtype), constants(dtype)
    wanted = torch.stack([by_torch(operation, table, number) for number in divisors])

    def right(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        place, which = (k, q) if index == "kv_idx" else (q, k)
        equal = which < 0
        for n, number in enumerate(divisors):
            found = OPERATIONS[operation](table[place], number)
            equal = equal | ((which == n) & (found == wanted[n, place]))
        return torch.where(equal, score, score - torch.inf)

    lengths = len(divisors), len(table)
    rows, columns = lengths if index == "kv_idx" else lengths[::-1]
    query, key = torch.zeros(1, 1, rows, 8), torch.zeros(1, 1, columns, 8)
    one_hot = torch.eye(columns)[None, None]
    out = anyflex.flex_attention(query, key, one_hot, right, **WAYS[way])
    assert isinstance(out, Tensor)
    held = out[0, 0] > 0 if index == "kv_idx" else out[0, 0].T > 0
    wrong = [(table[j].item(), divisors[n]) for n, j in (~held).nonzero().tolist()]
    assert wrong == []
