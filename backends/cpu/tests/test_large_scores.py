"""Scores that leave a softmax in floats little room, at every level and in every dtype.

Queries and keys are whole numbers and the scale is 1/8, so that float32 holds each score, and each
modified score, exactly: equal scores are equal.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from dense import assert_near, dense_attention, dense_gradients
from torch import Tensor

import anyflex

LOWEST = torch.finfo(torch.float32).min
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KEYS, WIDTH = 300, 64
ROWS_LOW = torch.zeros(KEYS).index_fill(0, torch.arange(0, KEYS, 5), LOWEST)
KEYS_LOW = torch.zeros(KEYS).index_fill(0, torch.arange(1, KEYS, 3), LOWEST)

ScoreMod = Callable[..., Tensor]
MODS: dict[str, ScoreMod] = {
    "lowest everywhere": lambda s, b, h, q, k: s + LOWEST,
    "lowest rows": lambda s, b, h, q, k: s + ROWS_LOW[q],
    "lowest rows and keys": lambda s, b, h, q, k: torch.where(
        torch.minimum(ROWS_LOW[q], KEYS_LOW[k]) < 0, LOWEST, s
    ),
    "raised": lambda s, b, h, q, k: s + 2.0**20,
    "lowered": lambda s, b, h, q, k: s - 2.0**20,
    "in steps": lambda s, b, h, q, k: s + (k // 40) * 3000.0,
    "in small steps": lambda s, b, h, q, k: s + (k // 10) * 700.0,
}


def drawn(rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Query, key, value and the incoming gradient of out."""
    generator = torch.Generator().manual_seed(rows)
    query, key = (
        torch.randint(-2, 3, (2, 2, length, WIDTH), generator=generator).to(dtype)
        for length in (rows, KEYS)
    )
    value, dout = (
        torch.randn(2, 2, length, WIDTH, generator=generator).to(dtype) for length in (KEYS, rows)
    )
    return query, key, value, dout


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 37, KEYS])
@pytest.mark.parametrize("mod", MODS)
def test_large_scores_by_a_mod(mod: str, rows: int, dtype: torch.dtype, level: str) -> None:
    *inputs, dout = drawn(rows, dtype)
    leaves = [each.requires_grad_() for each in inputs]
    out, lse = anyflex.flex_attention(*leaves, MODS[mod], return_lse=True, backend="cpu")
    wanted, wanted_lse = dense_attention(*leaves, MODS[mod])
    assert_near(out, wanted, dtype, "out")
    assert_near(lse, wanted_lse, torch.float32, "lse")
    grads = torch.autograd.grad(out, leaves, dout)
    exact = dense_gradients(tuple(inputs), dout, MODS[mod])
    for name, found, right in zip("qkv", grads, exact, strict=True):
        assert_near(found, right, dtype, f"d{name}")


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize(
    ("dtype", "width", "size"),
    [
        (torch.float16, 128, 4e4),
        (torch.float16, 64, 6e4),
        (torch.bfloat16, 64, 1e15),
        (torch.float32, 8, 1e15),
    ],
    ids=str,
)
def test_equal_products_share_the_weight(
    dtype: torch.dtype, width: int, size: float, rows: int, level: str
) -> None:
    query = torch.full((1, 1, rows, width), size, dtype=dtype)
    key = torch.full((1, 1, 20, width), size, dtype=dtype)
    value = torch.ones(1, 1, 20, width, dtype=dtype)
    value[:, :, ::2] = 3
    out = anyflex.flex_attention(query, key, value, backend="cpu")
    assert_near(out, torch.full_like(out, 2).double(), dtype)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("size", [1e10, 1e20, -1e20, 1e30])
def test_one_huge_element_of_a_key(size: float, rows: int, level: str) -> None:
    generator = torch.Generator().manual_seed(rows)
    query, key, value = (
        torch.randn(1, 1, length, 8, generator=generator) for length in (rows, KEYS, KEYS)
    )
    key[0, 0, 150, 2] = size
    out = anyflex.flex_attention(query, key, value, backend="cpu")
    assert_near(out, dense_attention(query, key, value)[0], torch.float32)
