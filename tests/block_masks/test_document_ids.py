"""Ids in any order: a mask depends on which of them are equal, not on their values."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import anyflex
from anyflex.intervals import id_labels, tables
from tests.block_masks.families import Sizes
from tests.block_masks.test_random_masks import CHECKED, COUNT, check
from tests.soak import SOAK

__all__: list[str] = []


@pytest.fixture(params=["small tables", "large tables"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to label ids, on tables that are small enough for a dense mask."""
    if request.param == "large tables":
        monkeypatch.setattr(id_labels, "_FEW", 0)
        monkeypatch.setattr(tables, "_MANY", 0)
    return str(request.param)


def pieces(length: int, count: int, seed: int = 0) -> Tensor:
    """Sorted ids int64 [length] of `count` documents, each in one piece."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.zeros(length, dtype=torch.int64)
    begins[torch.randperm(length - 1, generator=generator)[: count - 1] + 1] = 1
    return begins.cumsum(0)


def permuted(ids: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(int(ids.max()) + 1, generator=generator)[ids]


def spread(ids: Tensor) -> Tensor:
    """The same ids all over int64, both ends included."""
    names = torch.randint(-(1 << 62), 1 << 62, (int(ids.max()) + 1,))
    names[0], names[-1] = torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min
    return names[ids]


def returning(ids: Tensor) -> Tensor:
    """Two documents of one id."""
    return torch.where(ids == ids.max(), 0, ids)


ONE_ROW: dict[str, Callable[[], Tensor]] = {
    "permuted": lambda: permuted(pieces(700, 30)),
    "far from zero": lambda: permuted(pieces(700, 30)) - 10_000,
    "descending": lambda: pieces(700, 30).flip(0),
    "spread": lambda: spread(permuted(pieces(700, 30))),
    "every element its own": lambda: permuted(torch.arange(700)),
    "all equal": lambda: torch.full((700,), 5),
    "one returns": lambda: returning(permuted(pieces(700, 30))),
    "spread, one returns": lambda: spread(returning(permuted(pieces(700, 30)))),
    "far apart": lambda: permuted(pieces(700, 30)) << 40,
    "far apart, one returns": lambda: returning(permuted(pieces(700, 30))) << 40,
    "most return": lambda: permuted(pieces(700, 100)) % 7,
    "int8, both ends": lambda: (permuted(pieces(700, 256)) - 128).to(torch.int8),
    "uint8": lambda: permuted(pieces(700, 256)).to(torch.uint8),
    "int32": lambda: permuted(pieces(700, 30)).to(torch.int32),
    "strided": lambda: permuted(pieces(1400, 30))[::2],
}


CALLS = list(itertools.product(ONE_ROW, [(64, 64), (128, 32), (48, 80)]))


@pytest.mark.parametrize(("name", "block"), CALLS[:: 1 if SOAK else 2])
def test_ids_in_any_order_give_their_dense_mask(
    way: str, name: str, block: tuple[int, int]
) -> None:
    ids = ONE_ROW[name]()
    # The ids continue beyond the lengths, which end inside a block and inside a document.
    of = Sizes(1, 1, 650, 601, block)
    check(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), of)
    check(lambda b, h, q, k: ids[q] != ids[k], of)
    check(lambda b, h, q, k: ids[q + 3] == ids[k], of)
    check(lambda b, h, q, k: (ids[k] == ids[q]) | (ids[(q * 5) % 700] == ids[k]), of)


def test_ids_of_rows_give_their_dense_mask(way: str) -> None:
    of = Sizes(3, 3, 300, 300, (64, 32))
    rows = torch.stack([permuted(pieces(300, 9, seed), seed) for seed in range(3)])
    apart = rows + torch.arange(3)[:, None] * 1_000_000
    back = torch.stack([rows[0], returning(rows[1]), rows[2]])
    for ids in (rows, apart, back, rows.T.contiguous().T):
        check(lambda b, h, q, k, ids=ids: (ids[b, q] == ids[b, k]) & (q >= k), of)
        check(lambda b, h, q, k, ids=ids: ids[b, q] == ids[h, k], of)
        check(lambda b, h, q, k, ids=ids: ids[1, q] == ids[2, k], of)


def test_ids_of_two_tables_give_their_dense_mask(way: str) -> None:
    of = Sizes(1, 1, 300, 260, (32, 64))
    left, right = permuted(pieces(300, 9)), permuted(pieces(260, 9, 2), 4)
    check(lambda b, h, q, k: left[q] == right[k], of)
    ascending = pieces(300, 9)
    check(lambda b, h, q, k: ascending[q] == right[k], of)


@pytest.mark.parametrize("length", [1 << 14, (1 << 17) + 57])
def test_permuted_ids_and_sorted_ids_give_equal_runs(length: int) -> None:
    ids = pieces(length, 500)

    def built(ids: Tensor) -> anyflex.BlockMask:
        return anyflex.create_block_mask(
            lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, length, length
        )

    wanted = built(ids)
    for other in (permuted(ids), spread(permuted(ids)), ids - 77):
        found = built(other)
        assert torch.equal(found.offsets, wanted.offsets)
        assert torch.equal(found.runs, wanted.runs)


@settings(CHECKED, max_examples=max(20, COUNT // 20))
@given(data=st.data())
def test_random_ids_give_their_dense_mask_by_large_tables_too(data: Any) -> None:
    length, longest = data.draw(st.integers(1, 90)), data.draw(st.sampled_from([1, 4, 20]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 20)))
    ids = torch.randint(12, (length,), generator=generator).repeat_interleave(longest)[:length]
    ids = ids * data.draw(st.sampled_from([1, 1 << 40]))
    q, kv = (data.draw(st.integers(1, ids.numel())) for _ in range(2))
    block = (data.draw(st.sampled_from([16, 24])), data.draw(st.sampled_from([16, 32, 40])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_labels, "_FEW", data.draw(st.sampled_from([0, 1 << 16])))
        patch.setattr(tables, "_MANY", 0)
        check(lambda b, h, q, k: ids[q] == ids[k], Sizes(1, 1, q, kv, block))
