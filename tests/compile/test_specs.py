"""Few specs: what is run-time never compiles anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.contract.spec import Spec
from anyflex.runtime import plan

__all__: list[str] = []

LENGTHS = (65, 66, 70, 72, 80, 81, 96, 100, 111, 112, 120, 128)


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    """Begin and end without any plan, and without a history of numbers."""
    plan.clear_plans()
    yield
    plan.clear_plans()


def specs() -> set[Spec]:
    """Specs that were planned since the test began."""
    return {one.spec for one in plan._plans.values()}


def inputs(
    batch: int, length: int, dim: int = 8, kv_length: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value; few keys make a call cheap."""
    generator = torch.Generator().manual_seed(length)
    kv_length = length if kv_length is None else kv_length
    query = torch.randn((batch, 2, length, dim), generator=generator)
    key, value = (torch.randn((batch, 2, kv_length, dim), generator=generator) for _ in "kv")
    return query, key, value


def test_layers_lengths_and_batches_share_one_spec() -> None:
    tables = [torch.randn(256) for _ in range(32)]
    for length in LENGTHS:
        mask = anyflex.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, length, 8, BLOCK_SIZE=64)
        for batch in (1, 2, 3):
            tensors = inputs(batch, length, kv_length=8)
            for table in tables:
                anyflex.flex_attention(
                    *tensors,
                    lambda s, b, h, q, k, t=table: s + t[k],
                    mask,
                )
    assert len(specs()) == 1


def test_a_class_of_lengths_is_one_spec() -> None:
    for length in (1, 2, 3, 64, *LENGTHS):
        anyflex.flex_attention(*inputs(1, length))
    assert {spec.q_class for spec in specs()} == {"one", "short", "long"}
    assert len(specs()) == 3


def test_a_window_that_changes_each_call_takes_two_specs() -> None:
    query, key, value = inputs(1, 80)
    for window in range(5, 17):
        mask = anyflex.create_block_mask(
            lambda b, h, q, k, w=window: (q - k).abs() < w, 1, 1, 80, 80, BLOCK_SIZE=32
        )
        anyflex.flex_attention(query, key, value, block_mask=mask)
    assert len(specs()) <= 2


@pytest.mark.parametrize("values", [[0.1 * i for i in range(12)], list(range(12))])
def test_a_number_that_changes_each_call_takes_two_specs(values: list[Any]) -> None:
    query, key, value = inputs(1, 80)
    for weight in values:
        anyflex.flex_attention(query, key, value, lambda s, b, h, q, k, w=weight: s + k * w)
    assert len(specs()) <= 2


def test_strides_and_scales_are_no_part_of_a_spec() -> None:
    for scale in (None, 0.1, 0.2):
        for size in (64, 128):
            query, key, value = inputs(1, 80, size)
            part: Any = (slice(None), slice(None), slice(None), slice(0, 64))
            anyflex.flex_attention(query[part], key[part], value[part], scale=scale)
    assert len(specs()) == 1
