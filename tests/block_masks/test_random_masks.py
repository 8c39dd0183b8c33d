"""Random masks: the runs are those of the dense mask, exactly, forward and transposed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import anyflex
from tests.block_masks.families import FAMILIES, Sizes, Source, mask_mods, sizes
from tests.soak import SOAK

__all__: list[str] = []

COUNT = 20000 if SOAK else 200
"""Number of masks that are drawn: CI's share, or that of `make soak`."""
EACH = max(3, COUNT // 2 // len(FAMILIES))
"""Number of masks of each family alone; the others are combinations."""

CHECKED = settings(
    deadline=None,
    derandomize=not SOAK,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def dense(mask_mod: Callable[..., Any], of: Sizes) -> Tensor:
    """The mask by torch alone: the function on tensors of all indices, bool [B, H, Q, KV]."""
    b, h = torch.arange(of.batch)[:, None, None, None], torch.arange(of.heads)[:, None, None]
    return mask_mod(b, h, torch.arange(of.q)[:, None], torch.arange(of.kv)).expand(
        of.batch, of.heads, of.q, of.kv
    )


def kinds(mask: Tensor, block: tuple[int, int]) -> Tensor:
    """int8 [B, H, rows, columns]: 1 where all elements inside the lengths are live, 2 where some
    are, else 0."""
    _, _, q, kv = mask.shape
    pad = (0, -kv % block[1], 0, -q % block[0])
    some, every = (
        torch.nn.functional.pad(mask, pad, value=value)
        .unflatten(3, (-1, block[1]))
        .unflatten(2, (-1, block[0]))
        for value in (False, True)
    )
    some, every = some.any(5).any(3), every.all(5).all(3)
    return torch.where(every, 1, torch.where(some, 2, 0)).to(torch.int8)


def check(mask_mod: Callable[..., Any], of: Sizes) -> None:
    mask = anyflex.create_block_mask(
        mask_mod, of.batch, of.heads, of.q, of.kv, BLOCK_SIZE=of.block
    )
    wanted = kinds(dense(mask_mod, of), of.block)
    views = mask.views()
    found = views.kind_rows(0, views.q_blocks)
    torch.testing.assert_close(found.expand_as(wanted), wanted, rtol=0, atol=0)
    transposed = views.transposed()
    across = transposed.kind_rows(0, transposed.q_blocks).transpose(2, 3)
    torch.testing.assert_close(across.expand_as(wanted), wanted, rtol=0, atol=0)
    for one in (views, transposed):
        check_canonical(one.offsets, one.runs)


def check_canonical(offsets: Tensor, runs: Tensor) -> None:
    """Runs of a row are sorted, disjoint and merged."""
    assert offsets.dtype == runs.dtype == torch.int32
    for row in offsets.flatten(0, 1).tolist():
        for begin, end in itertools.pairwise(row):
            before, kind_before = 0, 0
            for first, last, kind in runs[begin:end].tolist():
                assert before <= first < last
                assert first > before or kind != kind_before, "neighbours of one kind"
                before, kind_before = last, kind


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_family_gives_the_blocks_of_its_dense_mask(family: str) -> None:
    @settings(CHECKED, max_examples=EACH)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        of = data.draw(sizes())
        check(FAMILIES[family](Source(data.draw, of)), of)

    run()


@settings(CHECKED, max_examples=max(100, COUNT - EACH * len(FAMILIES)))
@given(st.data())
def test_combinations_give_the_blocks_of_their_dense_mask(data: st.DataObject) -> None:
    of = data.draw(sizes())
    check(data.draw(mask_mods(of)), of)
