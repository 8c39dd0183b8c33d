"""Numbers that torch.compile takes for variables, wherever a call may meet them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from tests.compile.graphs import CountingBackend
from tests.soak import SOAK

__all__: list[str] = []

LENGTH = 24


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn((1, 2, LENGTH, 4), generator=generator) for _ in "qkv")
    return query, key, value


OLDER_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
DYNAMIC = [None, *([True] if SOAK else [])]
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


CALLS = list(itertools.product(COMPARISONS, [False, True], [(2, 3, 5, 9), (2.5, 3.0, 5.5, 9.5)]))


@pytest.mark.parametrize(("name", "number_first", "values"), CALLS[:: 1 if SOAK else 11])
def test_a_comparison_with_a_number_that_changes(
    name: str, number_first: bool, values: tuple[float, ...]
) -> None:
    if number_first and name in ("lt", "le", "ge") and OLDER_TORCH:
        pytest.skip("torch before 2.13 raises for a number compared with an object, number first")
    compare: Callable[[Any, Any], Any] = getattr(operator, name)

    def attend(query: Tensor, key: Tensor, value: Tensor, number: float) -> Any:
        def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            near = compare(number, q - k) if number_first else compare(q - k, number)
            return torch.where(near, s, s - 4.0)

        return anyflex.flex_attention(query, key, value, mod)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=(counter := CountingBackend()), fullgraph=True)
    for number in values:
        torch.testing.assert_close(compiled(*inputs(), number), attend(*inputs(), number))
    assert counter.graphs <= 2


@pytest.mark.parametrize("dynamic", DYNAMIC)
def test_block_sizes_that_change(dynamic: bool | None) -> None:
    torch._dynamo.reset()

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: anyflex.BlockMask) -> Any:
        return anyflex.flex_attention(query, key, value, block_mask=mask)

    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=dynamic)
    for block_size in (16, 32, (16, 32), (64, 16)):
        mask = anyflex.create_block_mask(
            lambda b, h, q, k: q >= k, None, None, LENGTH, LENGTH, BLOCK_SIZE=block_size
        )
        torch.testing.assert_close(compiled(*inputs(), mask), attend(*inputs(), mask))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dynamic", DYNAMIC)
def test_options_and_decimals_that_change(dynamic: bool | None) -> None:
    torch._dynamo.reset()

    def attend(query: Tensor, key: Tensor, value: Tensor, number: int) -> Any:
        return anyflex.flex_attention(
            query,
            key,
            value,
            lambda s, b, h, q, k: torch.round(s, decimals=number),
            kernel_options={"BLOCK_M": 16 * number},
        )

    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=dynamic)
    for number in (1, 2, 4):
        torch.testing.assert_close(compiled(*inputs(), number), attend(*inputs(), number))
