"""Packed sequences and pages in Hopper's forward, whose kernel and mods run in Python, against the
dense formula in float64."""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from gluon_in_python import NotInSource, in_numpy, mod_in_python, run_kernel
from recording import OnHopper, recording
from scripts_beside import SOAK
from test_hopper_calls import CALLED, MODS
from torch import Tensor

import anyflex
from anyflex.plugin import PluginError, isolated, register
from anyflex_cuda import forward_call, hopper_forward, packed_tile_list, packed_tiles
from anyflex_cuda.gluon_kernels import GluonPrograms
from anyflex_cuda.packed_decode_call import PackedDecode
from anyflex_triton import sequences, tiles
from anyflex_triton.building import Program

Mod = Callable[..., Any]

BOTH = anyflex.AuxRequest(lse=True, max_scores=True)
SLOPES = torch.randn(16, 8, generator=torch.Generator().manual_seed(9))
BY_KEY = torch.randn(600, generator=torch.Generator().manual_seed(8))
LIMITS = torch.randint(0, 300, (16,), generator=torch.Generator().manual_seed(7))


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & ((q_idx - kv_idx < 40 + 3 * b) | (kv_idx < LIMITS[b]))


def of_heads(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 20 + 100 * h)


def every_other(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Mask of more runs than a record holds."""
    return kv_idx // 128 % 2 == 0


def slope(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - SLOPES[b, h] * (q_idx - kv_idx) * 0.01 + BY_KEY[kv_idx]


@dataclass(frozen=True)
class Batch:
    """A call of packed sequences.

    Args:
        rows, keys: of each sequence.
        page: rows of a page, or 0 for packed keys.
        heads: query heads, and those that share a key head.
        spare: padding rows.
        is_nhd: whether a page's rows come before its heads.
        odd: whether some values of the sequences themselves are non-finite.
        cores: number of programs.
    """

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    page: int = 0
    dims: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (2, 1)
    mods: tuple[Mod | None, Mod | None] = (None, causal)
    spare: int = 3
    is_nhd: bool = False
    odd: bool = False
    cores: int = 3


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def slots_of(batch: Batch) -> list[int]:
    return random.Random(len(batch.rows)).sample(range(len(batch.rows) + 3), len(batch.rows))


def wanted(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    """Return out, lse and max_scores, given packed keys."""
    score_mod, mask_mod = batch.mods
    q, k, v = q.double(), k.double(), v.double()
    heads, group = batch.heads
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    lse, highest = (q.new_full(q.shape[:2], -torch.inf) for _ in range(2))
    places = zip(
        offsets(batch.rows).tolist(), batch.rows, offsets(batch.keys).tolist(), batch.keys,
        slots_of(batch), strict=False,
    )  # fmt: skip
    for begin, rows, first, keys, slot in places:
        if rows == 0 or keys == 0:
            continue
        mine = q[begin : begin + rows].transpose(0, 1)
        k_mine, v_mine = (
            t[first : first + keys].repeat_interleave(group, 1).transpose(0, 1) for t in (k, v)
        )
        at = (
            torch.tensor(slot),
            torch.arange(heads)[:, None, None],
            torch.arange(rows)[:, None] + keys - rows,
            torch.arange(keys),
        )
        scores = mine @ k_mine.transpose(1, 2) * q.shape[2] ** -0.5
        if score_mod is not None:
            scores = score_mod(scores, *at)
        live = torch.ones((), dtype=torch.bool) if mask_mod is None else mask_mod(*at)
        live = live.expand(scores.shape)
        scores = torch.where(live, scores, -torch.inf)
        sums = scores.logsumexp(-1, keepdim=True)
        weights = (scores - sums.nan_to_num(neginf=0.0)).exp()
        weights = torch.where(live, weights, 0.0)
        found = weights @ torch.where(v_mine.isfinite(), v_mine, 0.0)
        # A non-finite value reaches the rows that see it, and no others.
        strange = torch.where(v_mine.isfinite(), 0.0, v_mine)
        seen = torch.where(live[..., None], strange[:, None], 0.0).sum(2)
        out[begin : begin + rows] = (found + seen).transpose(0, 1)
        lse[begin : begin + rows] = sums[..., 0].T
        highest[begin : begin + rows] = scores.amax(-1).T
    return out, lse, highest


def table_of(batch: Batch) -> tuple[Tensor, int]:
    """Return a page table whose entries past a sequence's length lead nowhere, and the number of
    pages."""
    width = -(-max(*batch.keys, 1) // batch.page) + 1
    lines = len(batch.rows) + 3
    table = torch.randperm(lines * width, generator=torch.Generator().manual_seed(0))
    table = table.view(lines, width).to(torch.int32)
    for i, (slot, length) in enumerate(zip(slots_of(batch), batch.keys, strict=True)):
        table[slot, -(-length // batch.page) :] = (2**31 - 1, -1, lines * width)[i % 3]
    return table, lines * width


def pool_of(packed: Tensor, batch: Batch, table: Tensor, pages: int) -> Tensor:
    """Return the pages of packed keys, whose other rows are NaN."""
    heads, dims = packed.shape[1:]
    shape = (pages, batch.page, heads, dims) if batch.is_nhd else (pages, heads, batch.page, dims)
    pool = packed.new_full(shape, torch.nan)
    pool = pool.transpose(1, 2) if batch.is_nhd else pool
    begins = offsets(batch.keys).tolist()
    for slot, begin, length in zip(slots_of(batch), begins, batch.keys, strict=False):
        for first in range(0, length, batch.page):
            count = min(batch.page, length - first)
            rows = packed[begin + first : begin + first + count].transpose(0, 1)
            pool[table[slot, first // batch.page], :, :count] = rows
    return pool


@pytest.fixture(autouse=True)
def of_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Core makes structures as on a device, where bounds alone are known, and short sequences
    aren't decoded."""
    # No public name leads there: users can't ask for it on a CPU.
    made = importlib.import_module("anyflex.packed.row_blocks")
    monkeypatch.setattr("anyflex.packed.own_layout.row_blocks", made.static_row_blocks)
    monkeypatch.setattr("anyflex.packed.own_layout.offsets_within", made.static_offsets)
    monkeypatch.setattr(PackedDecode, "refusal", lambda decode, call: "forward is tested alone")
    yield


def computed(
    batch: Batch, seed: int = 0, changed: tuple[str, str] = ("", ""), short_rows: int = 0
) -> tuple[Any, ...]:
    """Return (what the kernel gave, what the formula gives).

    Args:
        seed, changed: arguments of `run_kernel`.
        short_rows: the kernel's argument.
    """
    heads, group = batch.heads
    q = drawn(sum(batch.rows) + batch.spare, heads, batch.dims[0], seed=seed)
    k, v = (drawn(sum(batch.keys), heads // group, d, seed=seed + d) for d in batch.dims)
    if batch.odd:
        v[7, 0, 5], v[len(v) // 2, -1, 1], v[-1, :, 3] = torch.nan, torch.inf, -torch.inf
    expected = wanted(q, k, v, batch)
    slots = torch.tensor(slots_of(batch), dtype=torch.int32)
    if batch.page:
        table, pages = table_of(batch)
        k, v = (pool_of(t, batch, table, pages) for t in (k, v))
        packed = anyflex.Packed(
            offsets(batch.rows), torch.tensor(batch.keys, dtype=torch.int32), page_table=table,
            slots=slots,
        )  # fmt: skip
    else:
        # Rows past the last sequence's keys belong to nobody.
        k, v = (torch.cat([t, torch.full_like(t[:1], torch.nan)]) for t in (k, v))
        packed = anyflex.Packed(offsets(batch.rows), kv_offsets=offsets(batch.keys), slots=slots)
    ran = []

    def launch(
        program: Program, grid: int, device: torch.device, values: Mapping[str, Any]
    ) -> None:
        given = dict(program.constants)
        ran.append(program.function.__name__)
        if program.function is packed_tile_list.tile_kernel:
            values = {**values, "short_rows": short_rows}
            values["tile_list"].fill_(-(2**31))
            given |= in_numpy({each: values[each] for each in program.types})
            own = changed if changed[0] in inspect.getsource(packed_tile_list) else ("", "")
            run_kernel(packed_tile_list, "tile_kernel", grid, given, seed, own, (tiles, sequences))
            return
        for name in MODS:
            if given[name] is not None:
                given[name] = mod_in_python(given[name])
        for name in ("out", "lse", "max_scores"):
            values[name].fill_(torch.nan)
        given |= in_numpy({each: values[each] for each in program.types})
        called = (*CALLED, sequences, packed_tile_list, packed_tiles)
        run_kernel(hopper_forward, "forward_kernel", grid, given, seed, changed, called)

    with isolated():
        register("cuda", OnHopper)
        with (
            recording(),
            mock.patch.object(forward_call, "cores", lambda device: batch.cores),
            mock.patch.object(Program, "launch", launch),
        ):
            out, aux = anyflex.flex_attention_packed(
                q, k, v, packed.begin(), *batch.mods, enable_gqa=True, return_aux=BOTH,
                backend="cuda",
            )  # fmt: skip
    assert ran == ["tile_kernel", "forward_kernel"]
    return (out, aux.lse, aux.max_scores), expected


def check(batch: Batch, seed: int = 0, changed: tuple[str, str] = ("", "")) -> None:
    for found, expected in zip(*computed(batch, seed, changed), strict=True):
        tolerance = 4e-3 if found.dtype is torch.float16 else 1e-3
        torch.testing.assert_close(
            found.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
        )


ROWS, KEYS = (5, 0, 1, 130, 17, 3), (5, 7, 127, 257, 0, 1)
CASES = {
    "packed": Batch(ROWS, KEYS),
    "packed, no mask": Batch(ROWS, KEYS, mods=(None, None), dims=(128, 128), heads=(4, 4)),
    "packed, mods": Batch(ROWS, KEYS, mods=(slope, window), dims=(128, 64), heads=(7, 7)),
    "packed, heads": Batch(ROWS, KEYS, mods=(None, of_heads)),
    "packed, many runs": Batch((65, 3), (2100, 9), mods=(None, every_other)),
    "page 16": Batch(ROWS, KEYS, 16, dims=(128, 128), is_nhd=True),
    "page 48": Batch(ROWS, KEYS, 48, dims=(96, 96), mods=(slope, window)),
    "page 64": Batch(ROWS, KEYS, 64, dims=(128, 64), mods=(None, None)),
    "page 128": Batch((128, 129, 127), (128, 129, 255), 128, (128, 128), (4, 4), spare=130),
    "page 256": Batch((128, 129, 127), (255, 256, 257), 256, (256, 256), (2, 2), spare=0),
    "packed, one box": Batch((5, 9, 27), (9, 14, 30), heads=(7, 7), spare=0, odd=True),
    "blocks to spare": Batch((100,) * 4, (100,) * 4, spare=0),
    "odd": Batch((70, 60), (130, 60), odd=True, dims=(128, 128), mods=(None, causal)),
    "odd, pages": Batch((70, 60), (130, 60), 16, odd=True, is_nhd=True, mods=(slope, window)),
}


@pytest.mark.parametrize("name", list(CASES)[:: 1 if SOAK else 3])
def test_a_packed_call_gives_what_the_formula_gives(name: str) -> None:
    check(CASES[name])


def drawn_batch(chance: random.Random) -> Batch:
    """Return a random batch."""
    page = chance.choice([0, 16, 32, 48, 64, 80, 128, 256])
    edges = [0, 1, 64, 127, 128, 129, *(max(page, 5) + i for i in (-1, 0, 1))]
    keys = [chance.choice([*edges, chance.randint(1, 400)]) for _ in range(chance.randint(1, 5))]
    # A query row may have no key before it. The last sequence is too long to be decoded.
    rows = [chance.choice([0, 1, chance.randint(1, 150), min(n, 140)]) for n in keys]
    mods = chance.choice(
        [(None, None), (None, causal), (slope, window), (None, of_heads), (slope, None)]
    )
    return Batch(
        (*rows, 70), (*keys, 75), page, chance.choice([(64, 64), (128, 128), (96, 64), (40, 96)]),
        chance.choice([(1, 1), (2, 2), (4, 4), (7, 7), (4, 2)]), mods,
        chance.choice([0, 1, 140]), chance.random() < 0.5, cores=chance.randint(1, 9),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40 if SOAK else 1))
def test_random_batches(seed: int) -> None:
    check(drawn_batch(random.Random(seed)), seed)


def test_short_sequences_are_left_to_another_kernel() -> None:
    batch = Batch((5, 90, 1, 20), (200, 90, 1, 300), 16, spare=5)
    (found, *_), (expected, *_) = computed(batch, short_rows=20)
    taken = torch.arange(121)
    taken = ((taken >= 5) & (taken < 95)) | (taken >= 116)
    torch.testing.assert_close(found[taken].double(), expected[taken], rtol=4e-3, atol=4e-3)
    assert found[~taken].isnan().all()


def test_rows_of_others_in_a_box_reach_no_result() -> None:
    # Sequences that end within a tensor's first box are loaded together with those behind them.
    check(CASES["packed, one box"])


def test_rows_behind_a_page_s_sequence_are_not_loaded() -> None:
    # NaN in them would send a tile to the second computation.
    check(CASES["page 64"], changed=("if gl.max(inexact.to(gl.int32), 0) > 0:", "if False:"))


FAULTS = [
    ("packed", "rows_there(first, end, ROWS) - ROWS, 0)", "rows_there(first, end, ROWS), 0)"),
    ("packed, one box", "- ROWS, 0)", "- ROWS, first)"),
    ("packed", "if end_row < ROWS:", "if False:"),
    ("packed", "(rows < end) & (columns < tensors", "(columns < tensors"),
    ("page 48", "numbers[i] * page_rows + key", "key"),
    ("page 64", "return gl.maximum(gl.minimum(end - first, ROWS), 0)", "return ROWS"),
    ("page 48", "page_rows + key % PAGE", "page_rows"),
    ("page 48", "(slot * BESIDE + c) * BOXES + i", "(slot * BESIDE + c) * BOXES"),
    ("page 16", "key // pages.SIZE, mask", "0 * key, mask"),
    ("packed, mods", "mod_b += own.b", "pass"),
    ("packed, mods", "q_shift = shifts[2] + own.shift", "q_shift = shifts[2]"),
    ("page 48", "kv_length = own.kv_length", "kv_length = call.kv_length"),
    ("packed", "at // size * TILE_WORDS", "0"),
    ("packed", "* schedule.head_group\n    size", "* 0\n    size"),
    ("packed", "item - first_head * tiles", "item"),
    ("packed", "plain += whole", "pass"),
    ("packed, mods", "rows - 1 - first - lanes", "rows - 1 - lanes"),
    ("packed, heads", "if lists_steps == 0:", "if False:"),
    ("blocks to spare", "live = live & (tile.first_row < tile.end_row)", "pass"),
    ("page 64", "word_of(record, 8)", "0"),
    ("packed, many runs", "RUNS_PLACE + i * 3)", "RUNS_PLACE)"),
    ("packed, many runs", "and i < LISTED_RUNS", "and i >= 0"),
    ("packed", "record = next_record", "pass"),
    ("packed", "turn % queries.SLOTS * queries.CONSUMERS + c", "c"),
    ("packed", "(turn // queries.SLOTS) & 1", "turn & 1"),
    ("packed", "(earlier >= 0) & (step - earlier <= STAGES)", "False"),
    ("packed", "gl.num_programs(0) + gl.sum(ticket, 0)", "count"),
    ("odd, pages", "mod_b += own.b\n        q_shift", "q_shift"),
    ("odd, pages", "page * pointed.page_stride", "0 * page"),
]


@pytest.mark.parametrize(("name", "piece", "instead"), FAULTS[:: 1 if SOAK else 6])
def test_without_a_piece_of_it_a_packed_call_fails(name: str, piece: str, instead: str) -> None:
    # Two groups of heads, and more rows of blocks than a program looks at, for those that need it.
    batch = CASES[name]
    if "first" in piece or "item" in piece:
        batch = Batch((3,) * 300, (3,) * 300, heads=(2, 1), cores=5)
    for seed in range(3):
        try:
            with mock.patch.object(GluonPrograms, "head_group", lambda *_: 1):
                check(batch, seed, (piece, instead))
        except (AssertionError, PluginError) as error:
            assert not isinstance(error.__cause__, NotInSource), piece
            return
    pytest.fail("every seed gave the right outputs")
