"""Masks that once came out wrong: each for a reason of its own, which its name states."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.errors import BlockMaskError
from tests.block_masks.families import Sizes
from tests.block_masks.test_random_masks import check
from tests.soak import SOAK

__all__: list[str] = []


def blocks_are_those_of_the_elements(
    mask_mod: Callable[..., Any], batch: int = 1, heads: int = 1, length: int = 200
) -> None:
    check(mask_mod, Sizes(batch, heads, length, length, (16, 32)))


def ids(*shape: int, high: int = 3) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.int32, 1 << 32), (torch.uint8, 256), (torch.int16, 1 << 14)]
)
def test_ids_that_a_conversion_makes_equal_are_equal(dtype: torch.dtype, factor: int) -> None:
    table = torch.arange(200) // 20 * factor
    blocks_are_those_of_the_elements(lambda b, h, q, k: table[q].to(dtype) == table[k].to(dtype))


def test_tables_of_as_many_rows_in_other_shapes_are_read_in_different_rows() -> None:
    ours, theirs = ids(2, 3, 200), ids(3, 2, 200)
    blocks_are_those_of_the_elements(lambda b, h, q, k: ours[b, h, q] == theirs[b, h, k], 2, 2)


@pytest.mark.parametrize(
    "term",
    [
        lambda levels: levels % 300 < 20,
        lambda levels: levels // 300 < 1,
    ],
)
def test_a_number_that_a_tables_type_cannot_hold_wraps(term: Callable[[Any], Any]) -> None:
    table = ids(200, high=256).to(torch.uint8)
    blocks_are_those_of_the_elements(lambda b, h, q, k: term(table[q]) & (k >= 0))


def through_int8(b: Any, h: Any, q: Any, k: Any) -> Any:
    wrapped = q.to(torch.uint8) - 5  # 251 to 255 where q is below 5
    return wrapped.long().to(torch.int8) == wrapped.long()


def through_a_float(b: Any, h: Any, q: Any, k: Any) -> Any:
    wrapped = q.to(torch.uint8) - 5
    return wrapped.float().long().to(torch.int8) == wrapped.long()


def hashed(b: Any, h: Any, q: Any, k: Any) -> Any:
    """int64 wraps, and its range without wrapping is more than a tensor holds."""
    return ((q * 0x5DEECE66D * k * 0x5DEECE66D).float() * 2.0**-64 * 10).long() < 3


@pytest.mark.parametrize("mask_mod", [through_int8, through_a_float, hashed])
def test_what_is_made_of_an_integer_that_wraps_is_that_of_the_wrapped_one(
    mask_mod: Callable[..., Any],
) -> None:
    blocks_are_those_of_the_elements(mask_mod, length=80)  # which int8 holds


def each_and(live: Tensor, term: Tensor) -> Tensor:
    return live & term


def before_each(live: Tensor, term: Tensor) -> Tensor:
    return term & live


def each_chosen(live: Tensor, term: Tensor) -> Tensor:
    return torch.where(term, live, ~term)


def itself(live: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return live


def chosen_number(live: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(live, q, k) >= k


def added(live: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return live.to(torch.int32) + q >= k


def looked_up(live: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return TABLE[live.to(torch.int64)] >= k


TABLE = torch.tensor([3, 40])


JOINED, USED = (each_and, before_each, each_chosen), (itself, chosen_number, added, looked_up)


@pytest.mark.parametrize(
    ("joined", "used"), list(itertools.product(JOINED, USED))[:: 1 if SOAK else 3]
)
def test_a_mask_of_a_thousand_conditions_is_built(
    joined: Callable[..., Tensor], used: Callable[..., Tensor]
) -> None:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        live = q >= k
        for i in range(1000):
            live = joined(live, q + k != 7 * i + 1)
        return used(live, q, k)

    blocks_are_those_of_the_elements(mask_mod, length=50)


@pytest.mark.parametrize("name", ["exact", "separate_full_blocks", "dq_kv_order"])
def test_switches_of_create_block_mask_are_bools(name: str) -> None:
    with pytest.raises(BlockMaskError, match=f"^{name} must be a bool .* got NoneType"):
        anyflex.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 64, 64, **{name: None})


@pytest.mark.parametrize("size", [0, 1 << 31])
def test_the_block_sizes_that_there_are_are_named(size: int) -> None:
    with pytest.raises(
        BlockMaskError, match=rf"BLOCK_SIZE must be in 1\.\.2147483647, got {size}"
    ):
        anyflex.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 64, 64, BLOCK_SIZE=size)
