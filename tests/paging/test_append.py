"""The operation that writes rows into pages: where they land, and what they become."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from anyflex.paging.append_op import append_op
from anyflex.paging.append_rows import append_live_rows, append_rows
from anyflex.paging.storage import STORAGES

__all__: list[str] = []

PAGES, HEADS, SIZE, DIM, VALUE_DIM = 5, 2, 4, 8, 6
QUANTISED = [name for name in STORAGES if name != "plain"]

Pools = tuple[Tensor, Tensor]


def plain(dtype: torch.dtype) -> Pools:
    shape = (PAGES, HEADS, SIZE)
    return torch.empty(*shape, DIM, dtype=dtype), torch.empty(*shape, VALUE_DIM, dtype=dtype)


def rows_before_heads(dtype: torch.dtype) -> Pools:
    shape = (PAGES, SIZE, HEADS)
    key, value = (torch.empty(*shape, dim, dtype=dtype) for dim in (DIM, VALUE_DIM))
    return key.transpose(1, 2), value.transpose(1, 2)


def slices(dtype: torch.dtype) -> Pools:
    both = torch.empty(PAGES, HEADS, SIZE, DIM + VALUE_DIM, dtype=dtype)
    return both[..., :DIM], both[..., DIM:]


def layers_between(dtype: torch.dtype) -> Pools:
    key, value = (torch.empty(PAGES, 3, HEADS, SIZE, d, dtype=dtype) for d in (DIM, VALUE_DIM))
    return key[:, 1], value[:, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", [plain, rows_before_heads, slices, layers_between])
def test_rows_land_in_their_places_and_nothing_else_is_written(
    form: Callable[[torch.dtype], Pools], dtype: torch.dtype
) -> None:
    pools = form(dtype)
    key = torch.randn(6, HEADS, DIM, dtype=dtype)
    value = torch.randn(6, HEADS, VALUE_DIM, dtype=dtype)
    places = torch.tensor([7, -1, 0, PAGES * SIZE, 19, -(2**40)])
    expected = [torch.full_like(pool, torch.nan) for pool in pools]
    for i, place in enumerate(places.tolist()):
        if 0 <= place < PAGES * SIZE:
            for pool, rows in zip(expected, (key, value), strict=True):
                pool[place // SIZE, :, place % SIZE] = rows[i]
    live = (places >= 0) & (places < PAGES * SIZE)
    for drops, kept in ((True, slice(None)), (False, live)):
        for pool in pools:
            pool.fill_(torch.nan)
        append_op(*pools, None, None, key[kept], value[kept], places[kept], drops)
        for pool, wanted in zip(pools, expected, strict=True):
            torch.testing.assert_close(pool, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("places", [[], [-1], [-1, PAGES * SIZE, 2**60]])
def test_a_call_without_a_live_row_changes_no_bit(storage: str, places: list[int]) -> None:
    dtype = STORAGES[storage] or torch.float32
    pools = [torch.full_like(pool, 0.5, dtype=dtype) for pool in plain(torch.float32)]
    scales = [torch.full((PAGES, HEADS, SIZE), 0.25) if dtype.itemsize == 1 else None] * 2
    key, value = (torch.randn(len(places), HEADS, d) for d in (DIM, VALUE_DIM))
    append_op(*pools, *scales, key, value, torch.tensor(places, dtype=torch.int64))
    for pool in pools:
        assert torch.equal(pool.float(), torch.full_like(pool, 0.5, dtype=dtype).float())
    assert scales[0] is None or torch.equal(scales[0], torch.full_like(scales[0], 0.25))


def stored(storage: str, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, Hkv, E] as a pool has them, and their scales [T, Hkv, 1], in float64."""
    tokens = rows.shape[0]
    pool = torch.zeros(tokens, HEADS, 1, rows.shape[2], dtype=STORAGES[storage])
    scale = torch.full((tokens, HEADS, 1), torch.nan)
    append_op(pool, pool.clone(), scale, scale.clone(), rows, rows, torch.arange(tokens))
    return pool[:, :, 0].double(), scale.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("storage", QUANTISED)
def test_a_quantised_row_is_within_the_rounding_of_its_scale(
    storage: str, dtype: torch.dtype
) -> None:
    magnitudes = torch.tensor([1e-3, 1.0, 50.0, 1e-4])[:, None, None]
    rows = (torch.randn(64, 4, HEADS, 16) * magnitudes).flatten(0, 1).to(dtype)
    numbers, scale = stored(storage, rows)
    exact = rows.double()
    if storage == "int8":
        budget = 0.5001 * scale.expand_as(exact)
    else:  # 3 bits of mantissa, and steps of 2^-9 below 2^-6
        budget = torch.maximum(exact.abs() * 2**-4, scale * 2**-10) * 1.0001
    assert ((numbers * scale - exact).abs() <= budget).all()
    largest = 127 if storage == "int8" else 448
    assert (scale * largest - exact.abs().amax(-1, keepdim=True)).abs().max() < 1e-4


@pytest.mark.parametrize("storage", QUANTISED)
def test_the_largest_number_of_a_row_is_stored_as_the_largest_there_is(storage: str) -> None:
    largest = torch.logspace(-30, 30, 4001, dtype=torch.float64).float()
    rows = torch.stack([largest, -largest, largest / 3], -1)[:, None].expand(-1, HEADS, -1)
    numbers, _ = stored(storage, rows)
    most = 127 if storage == "int8" else 448
    assert (numbers[..., 0] == most).all() and (numbers[..., 1] == -most).all()


@pytest.mark.parametrize("storage", QUANTISED)
def test_a_row_of_zeros_has_a_positive_scale_and_is_read_as_zeros(storage: str) -> None:
    rows = torch.zeros(2, HEADS, DIM)
    rows[1] = 1e-45  # its scale would be 0
    numbers, scale = stored(storage, rows)
    assert (scale > 0).all()
    assert ((numbers * scale)[0] == 0).all()
    assert ((numbers * scale)[1] - rows[1].double()).abs().max() <= 1e-38


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("storage", QUANTISED)
def test_a_row_with_a_non_finite_number_is_read_as_non_finite_and_others_are_not(
    storage: str, bad: float
) -> None:
    rows = torch.randn(3, HEADS, DIM)
    rows[1, 0, 3] = bad
    numbers, scale = stored(storage, rows)
    read = numbers * scale
    assert not read[1, 0].isfinite().any()
    assert read[1, 1].isfinite().all() and read[[0, 2]].isfinite().all()


@pytest.mark.parametrize("storage", STORAGES)
def test_nothing_is_read_on_the_host(storage: str) -> None:
    """Fake tensors have no numbers, so reading one raises; a captured graph can't wait either."""
    with FakeTensorMode():
        dtype = STORAGES[storage]
        pool = torch.zeros(PAGES, HEADS, SIZE, DIM, dtype=dtype or torch.float32)
        scale = None if dtype is None else torch.zeros(PAGES, HEADS, SIZE)
        rows, places = torch.zeros(8, HEADS, DIM), torch.zeros(8).long()
        append_live_rows(((pool, scale, rows),) * 2, places)
        append_rows(((pool, scale, rows),) * 2, places, places)


def test_torchs_checks_of_operations_pass() -> None:
    """Their comparison of what was written knows no float8."""
    pools = [torch.zeros_like(pool, dtype=torch.int8) for pool in plain(torch.float32)]
    scales = [torch.ones(PAGES, HEADS, SIZE) for _ in "kv"]
    key, value = torch.randn(3, HEADS, DIM), torch.randn(3, HEADS, VALUE_DIM)
    torch.library.opcheck(append_op, (*pools, *scales, key, value, torch.tensor([4, -1, 9])))
