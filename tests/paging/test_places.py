"""Places of new tokens, found from a batch's tensors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from anyflex.packed.packed import Packed
from anyflex.paging.places import token_places, token_positions

__all__: list[str] = []

PAGES, SIZE = 5, 4
SPARE = -1
"""Stands for any row of the page behind the pool's."""
UNREAD = [SPARE] * 3


def places(packed: Packed, tokens: int) -> list[int]:
    page, row = token_places(packed, tokens, PAGES, SIZE)
    assert ((row >= 0) & (row < SIZE)).all()
    return torch.where(page == PAGES, SPARE, page * SIZE + row).tolist()


def batch(garbage: int) -> Packed:
    """Four sequences in other slots than their numbers, one empty; a table of 6 rows."""
    table = torch.full((6, 9), garbage, dtype=torch.int32)[:, :3]  # the row stride is larger
    table[4, 0], table[1, :2], table[5, :2] = 3, torch.tensor([2, 0]), torch.tensor([1, garbage])
    ints = [[0, 3, 3, 5, 8], [4, 0, 7, 6], [4, 0, 1, 5], [1, 0, 5, 3]]
    offsets, lengths, slots, starts = (torch.tensor(each, dtype=torch.int32) for each in ints)
    return Packed(
        offsets, lengths, page_table=table, slots=slots, q_starts=starts, max_q=3, max_kv=12
    )


@pytest.mark.parametrize("garbage", [2**31 - 1, -1, PAGES, -(2**31)])
def test_places_are_those_of_the_sequences_rows(garbage: int) -> None:
    packed = batch(garbage)
    # Slot 5 has page 1 for its position 3, and no page of the pool for 4 and 5.
    expected = [13, 14, 15, 1, 2, 7, SPARE, SPARE, SPARE, SPARE]
    assert places(packed, 10) == expected
    assert places(packed, 0) == []
    assert token_positions(packed, 10).tolist() == [1, 2, 3, 5, 6, 3, 4, 5, 0, 0]


@pytest.mark.parametrize(
    ("starts", "lengths", "slots", "expected"),
    [
        # Queries beyond the first sequence's keys, and before them.
        ([4, 0, 5, 3], [4, 0, 7, 6], [4, 0, 1, 5], [*UNREAD, 1, 2, 7, 16, 17]),
        ([-3, 0, 5, 3], [4, 0, 7, 6], [4, 0, 1, 5], [*UNREAD, 1, 2, 7, 16, 17]),
        # Slots that the table lacks.
        ([1, 0, 5, 3], [4, 0, 7, 6], [-1, 0, 1, 6], [*UNREAD, 1, 2, *UNREAD]),
        # Columns that it lacks.
        ([12, 0, 5, 3], [15, 0, 7, 6], [4, 0, 1, 5], [*UNREAD, 1, 2, 7, 16, 17]),
    ],
)
def test_rows_without_a_place_get_the_page_that_nobody_reads(
    starts: list[int], lengths: list[int], slots: list[int], expected: list[int]
) -> None:
    packed = batch(garbage=4)  # a page that the pool has
    for tensor, numbers in (
        (packed.q_starts, starts),
        (packed.kv_lengths, lengths),
        (packed.slots, slots),
    ):
        tensor.copy_(torch.tensor(numbers))
    assert places(packed, 8) == expected


def test_nothing_is_read_on_the_host() -> None:
    """Fake tensors have no numbers, so reading one raises; a captured graph can't wait either."""
    with FakeTensorMode():
        offsets, numbers = (torch.zeros(n, dtype=torch.int32) for n in (5, 4))
        table = torch.zeros(6, 3, dtype=torch.int32)
        packed = Packed(
            offsets,
            numbers,
            page_table=table,
            slots=numbers,
            q_starts=numbers,
            max_q=3,
            max_kv=12,
        )
        assert [each.shape for each in token_places(packed, 8, PAGES, SIZE)] == [(8,), (8,)]
