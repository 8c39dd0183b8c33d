"""Segments at the ends of blocks agree with those of each element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyflex.intervals import tables
from anyflex.intervals.block_bounds import BlockEnds
from anyflex.intervals.tables import segment_heads, spread_segments

__all__: list[str] = []


@settings(deadline=None, derandomize=True, database=None, max_examples=300)
@given(
    rows=st.integers(1, 4),
    row_length=st.integers(1, 70),
    least=st.integers(0, 69),
    block=st.sampled_from([1, 2, 3, 8, 12, 16, 64]),
    ids=st.sampled_from([1, 2, 5, 100]),
    many=st.sampled_from([0, 1 << 16]),
    seed=st.integers(0, 1000),
)
def test_blocks_begin_and_end_in_the_segments_of_their_elements(
    rows: int, row_length: int, least: int, block: int, ids: int, many: int, seed: int
) -> None:
    length = max(1, row_length - least)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(ids, (rows, row_length), generator=generator)
    # Expected segments, one element after the other.
    flat = values.flatten().tolist()
    begins = [i % row_length == 0 or flat[i] != flat[i - 1] for i in range(len(flat))]
    wanted = torch.tensor(begins).cumsum(0) - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_MANY", many)
        heads = segment_heads(values)
    assert heads.tolist() == [i for i, begin in enumerate(begins) if begin]
    assert torch.equal(spread_segments(heads, len(flat)).long(), wanted)
    ends = BlockEnds(heads, values.shape, length, block)
    low = torch.arange(0, length, block)
    high = (low + block).clamp(max=length) - 1
    for row in range(rows):
        for place in (row, torch.full_like(low, row)):
            first, last, exact = ends.look_up(place, low, high)
            assert exact is True
            assert torch.equal(first, wanted[row * row_length + low])
            assert torch.equal(last, wanted[row * row_length + high])
