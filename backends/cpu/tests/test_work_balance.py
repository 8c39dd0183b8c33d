"""Work follows the block mask: expensive rows first, jobs of equal cost, live columns alone.

Observed by the tiles that mods are run on, never by time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from watched_tiles import NAME, PRODUCT, STEP, WatchedBackend, visits

import anyflex
from anyflex.plugin import isolated, register

pytestmark = pytest.mark.usefixtures("threads", "watched")


@pytest.fixture
def watched() -> Iterator[None]:
    """The watched backend, registered for one test: in other tests the registry chooses."""
    torch.set_num_threads(1)
    visits.clear()
    with isolated():
        register(NAME, WatchedBackend)
        yield


def attend(
    mask: anyflex.BlockMask, length: int, keys: int, *, learn: bool = False, heads: int = 1
) -> None:
    """Call with a score mod that reads a captured number, and backward with its gradient. All
    scores are `PRODUCT` before the mod."""
    query = torch.ones(1, heads, length, 16, requires_grad=True)
    key = torch.ones(1, heads, keys, 16)
    assert PRODUCT == 16 * 16**-0.5
    factor = torch.tensor([1.5], requires_grad=learn)
    out = anyflex.flex_attention(
        query, key, key, lambda s, b, h, q, k: s * factor[0], mask, backend=NAME
    )
    out.sum().backward()


def first_seen(places: Iterator[int]) -> list[int]:
    return list(dict.fromkeys(places))


def test_forward_takes_rows_in_the_order_of_their_cost(level: str) -> None:
    # Blocks of 64 keys that each block of 128 queries sees: all are FULL.
    seen = torch.tensor([3, 9, 1, 16, 7, 12, 5, 14])
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: k < seen[q // 128] * 64, None, None, 1024, 1024, BLOCK_SIZE=(128, 64)
    )
    attend(mask, 1024, 1024)
    order = first_seen(visit.q // 128 for visit in visits if not visit.backward)
    assert order == sorted(range(8), key=lambda row: -int(seen[row]))


def test_a_partial_block_counts_as_dearer_than_a_full_one(level: str) -> None:
    # Both block rows see two blocks of keys; those of the second one are PARTIAL.
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: (k < 256) & ((q < 128) | ((q + k) % 2 == 0)), None, None, 256, 512
    )
    attend(mask, 256, 512)
    order = first_seen(visit.q // 128 for visit in visits if not visit.backward)
    assert order == [1, 0]


def test_backward_cuts_keys_into_jobs_by_their_cost(level: str) -> None:
    # Eight tiles of keys become four jobs, each with sums of its own. Cut in equal numbers of
    # tiles, one job would have both of those that all queries see, and 32 of 38 tiles of pairs.
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: (k < 256) | (q < 128), None, None, 2048, 1024
    )
    attend(mask, 2048, 1024, learn=True)
    jobs: Counter[int] = Counter()
    for visit in visits:
        if visit.backward:
            jobs[visit.sums] += visit.pairs
    assert sorted(jobs.values()) == [2 * 128 * 128, 4 * 128 * 128, 16 * 128 * 128, 16 * 128 * 128]


# 128 tiles of keys; of every 32, two are seen by all queries and 30 by 128 of them. Cut by number
# alone, all expensive ones would be in one of 16 equal shares.
KEYS, QUERIES = 128 * 128, 1024


def uneven() -> tuple[anyflex.BlockMask, Tensor]:
    dear = torch.arange(KEYS) // 128 % 32 < 2
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: dear[k] | (q < 128), None, None, QUERIES, KEYS
    )
    return mask, dear


def test_backward_shares_jobs_out_by_their_cost(level: str) -> None:
    mask, _ = uneven()
    attend(mask, QUERIES, KEYS, learn=True)
    shares: Counter[int] = Counter()
    for visit in visits:
        if visit.backward:
            shares[visit.sums] += visit.pairs
    assert len(shares) == 16 and 0 not in shares
    mean = sum(shares.values()) / 16
    assert max(shares.values()) < 2 * mean


def test_backward_takes_dear_keys_first(level: str) -> None:
    mask, dear = uneven()
    attend(mask, QUERIES, KEYS)
    order = first_seen(visit.kv // 128 for visit in visits if visit.backward)
    assert bool(dear[order[0] * 128]) and not bool(dear[order[-1] * 128])
    # A job is a range of tiles; jobs with an expensive one come first.
    last_dear = max(order.index(tile) for tile in range(128) if dear[tile * 128])
    assert last_dear < len(order) / 2


def live_pairs(mask: anyflex.BlockMask, length: int, keys: int) -> Tensor:
    return anyflex.create_mask(mask.mask_mod, None, None, length, keys)[0, 0]


BAND = (512, 16)
"""Length, and number of keys that a row sees: most of each listed block of 128 is dead."""


def band() -> anyflex.BlockMask:
    length, width = BAND
    return anyflex.create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < width), None, None, length, length, BLOCK_SIZE=128
    )


def test_prefill_multiplies_the_live_columns_of_partial_blocks_alone(level: str) -> None:
    mask = band()
    attend(mask, BAND[0], BAND[0])
    live = live_pairs(mask, BAND[0], BAND[0])
    forward = [visit for visit in visits if not visit.backward]
    assert forward
    for visit in forward:
        rows = slice(visit.q, visit.q + visit.rows)
        columns = range(visit.kv, visit.kv + visit.columns, STEP)
        wanted = [first for first in columns if live[rows, first : first + STEP].any()]
        assert list(visit.computed) == wanted, visit


def test_decoding_multiplies_live_columns_alone(level: str) -> None:
    keys = 2048
    mask = anyflex.create_block_mask(
        lambda b, h, q, k: (k % 256 >= 40) & (k % 256 < 60), None, None, 1, keys, BLOCK_SIZE=128
    )
    attend(mask, 1, keys, heads=2)
    forward = [visit for visit in visits if not visit.backward]
    computed = {(visit.h, first) for visit in forward for first in visit.computed}
    assert computed == {(head, first + 32) for head in range(2) for first in range(0, keys, 256)}


def test_backward_works_on_the_live_columns_of_partial_blocks_alone(level: str) -> None:
    mask = band()
    attend(mask, BAND[0], BAND[0])
    live = live_pairs(mask, BAND[0], BAND[0])
    worked_on = torch.zeros_like(live)
    for visit in visits:
        if not visit.backward:
            continue
        rows = slice(visit.q, visit.q + visit.rows)
        worked_on[rows, visit.kv : visit.kv + visit.columns] = True
        for first in range(visit.kv, visit.kv + visit.columns, STEP):
            assert live[rows, first : first + STEP].any(), visit
    assert not (live & ~worked_on).any()
    assert int(worked_on.sum()) < 7 * 128 * 128 / 2
