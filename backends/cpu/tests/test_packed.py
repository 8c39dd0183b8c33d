"""Packed sequences and pages as the native library takes them, at each level, by random calls."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from dense import ROUNDING, assert_near, dense_attention
from soak import SOAK
from torch import Tensor

import anyflex

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CALLS = 60 if SOAK else 6
"""Random calls of each type and level."""


class Sequences(NamedTuple):
    """Lengths of the sequences of a call, their slots and first positions."""

    q: list[int]
    kv: list[int]
    slots: list[int]
    starts: list[int]


def drawn_sequences(draw: random.Random) -> Sequences:
    count = draw.choice([0, 1, 2, 5, 9])
    q = [draw.choice([0, 1, 1, 1, 3, 16, 17, 130, draw.randint(1, 300)]) for _ in range(count)]
    kv = [draw.choice([0, 1, 31, 64, 513, draw.randint(1, 1400)]) for _ in range(count)]
    starts = [
        length - rows if draw.random() < 0.7 else draw.randint(-20, 900)
        for rows, length in zip(q, kv, strict=True)
    ]
    return Sequences(q, kv, draw.sample(range(12), count), starts)


def int32(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def in_pages(
    draw: random.Random, rows: list[Tensor], others: list[Tensor], page: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pools whose other rows are NaN, and the table of the slots, garbage past lengths."""
    width = max([-(-len(each) // page) for each in rows], default=0) + 1
    used = sum(-(-len(each) // page) for each in rows)
    pages = draw.sample(range(used + 3), used)
    table = torch.full((12, width), draw.choice([-1, 2**31 - 1, 10**6]), dtype=torch.int32)
    pools = []
    for each in (rows, others):
        heads, dim = each[0].shape[1:] if each else (2, 16)
        # Layouts of others: rows before heads, and a gap between pages.
        whole = torch.full((used + 3, page + draw.choice([0, 1]), heads, dim), torch.nan)
        pools.append(whole.to(each[0].dtype if each else torch.float32)[:, :page].transpose(1, 2))
    taken = iter(pages)
    for slot, (keys, values) in enumerate(zip(rows, others, strict=True)):
        for place, begin in enumerate(range(0, len(keys), page)):
            table[slot, place] = at = next(taken)
            for pool, each in zip(pools, (keys, values), strict=True):
                part = each[begin : begin + page]
                pool[at, :, : len(part)] = part.transpose(0, 1)
    return pools[0], pools[1], table


LIMITS = torch.tensor([4, 700, 64, 1, 0, 300, 12, 1000, 90, 33, 5, 256])
SLOPES = torch.linspace(-0.03, 0.03, 12 * 8).view(12, 8)


def slope(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[b, h] * (q_idx - kv_idx)


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx <= q_idx) | (kv_idx < LIMITS[b])


def far(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((q_idx - kv_idx) > 40) & ((kv_idx + h) % 5 != 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_sequence_is_computed_as_if_it_were_alone(
    dtype: torch.dtype, level: str, threads: None
) -> None:
    draw = random.Random(f"{dtype}{level}")
    for number in range(CALLS):
        torch.set_num_threads(draw.choice([1, 3]))
        check_call(draw, dtype, number)


def check_call(draw: random.Random, dtype: torch.dtype, number: int) -> None:
    of = drawn_sequences(draw)
    kv_heads, group = draw.choice([(1, 8), (2, 1), (2, 4), (4, 2)])
    dims = draw.choice([(16, 16), (64, 64), (128, 128), (40, 24), (96, 160)])
    generator = torch.Generator().manual_seed(number)

    def some(rows: int, heads: int, dim: int) -> Tensor:
        return torch.randn(rows, heads, dim, generator=generator).to(dtype)

    query = some(sum(of.q) + draw.choice([0, 5]), kv_heads * group, dims[0])
    keys = [some(length, kv_heads, dims[0]) for length in of.kv]
    values = [some(length, kv_heads, dims[1]) for length in of.kv]
    ends = int32([0, *accumulate(of.q)])
    page = draw.choice([None, 1, 7, 16, 48, 64, 256])
    if page is None:
        key, value = (
            torch.cat(each) if each else some(0, kv_heads, dims[i])
            for i, each in enumerate((keys, values))
        )
        places = {"kv_offsets": int32([0, *accumulate(of.kv)])}
    else:
        by_slot = dict(zip(of.slots, zip(keys, values, strict=True), strict=True))
        nothing = some(0, kv_heads, dims[0]), some(0, kv_heads, dims[1])
        rows, others = zip(*(by_slot.get(slot, nothing) for slot in range(12)), strict=True)
        key, value, table = in_pages(draw, list(rows), list(others), page)
        places = {"kv_lengths": int32(of.kv), "page_table": table}
    batch = anyflex.Packed(ends, slots=int32(of.slots), q_starts=int32(of.starts), **places)
    score_mod, mask_mod = draw.choice([None, slope]), draw.choice([None, prefix, far])
    out = torch.full((len(query), kv_heads * group, dims[1]), torch.nan, dtype=dtype)
    _, aux = anyflex.flex_attention_packed(
        query,
        key,
        value,
        batch.begin(),
        score_mod,
        mask_mod,
        enable_gqa=True,
        out=out,
        return_aux=anyflex.AuxRequest(lse=True, max_scores=True),
        backend="cpu",
    )
    assert (out[ends[-1] :] == 0).all() and (aux.lse[ends[-1] :] == -torch.inf).all()
    for i, (slot, start) in enumerate(zip(of.slots, of.starts, strict=True)):
        q = slice(ends[i], ends[i + 1])
        dense = (t.transpose(0, 1)[None] for t in (query[q], keys[i], values[i]))
        mods = (
            None if mod is None else moved(mod, slot, start, mod is slope)
            for mod in (score_mod, mask_mod)
        )
        wanted, lse = dense_attention(*dense, *mods)
        assert_near(out[q].transpose(0, 1)[None], wanted, dtype)
        allowed = 300 * ROUNDING[torch.float32] * (1 + lse.abs().nan_to_num(0, 0, 0))
        found = aux.lse[q].T[None].double()
        assert ((found == lse) | ((found - lse).abs() <= allowed)).all()


def moved(mod: Any, slot: int, start: int, of_scores: bool) -> Any:
    """Return a mod of one sequence that sees what the packed call's mods see."""
    if of_scores:
        return lambda score, b, h, q, k: mod(score, b + slot, h, q + start, k)
    return lambda b, h, q, k: mod(b + slot, h, q + start, k)


def test_a_sequence_s_bits_depend_on_it_alone(level: str, threads: None) -> None:
    generator = torch.Generator().manual_seed(0)
    pools = torch.randn(2, 300, 2, 16, 64, generator=generator).bfloat16()
    table = torch.randperm(300, generator=generator).view(4, 75).to(torch.int32)
    query = torch.randn(45, 8, 64, generator=generator).bfloat16()
    q, kv = [1, 40, 3, 1], [1100, 900, 30, 1]
    rows = query.split(q)

    def run(order: list[int], count: int) -> dict[int, Tensor]:
        torch.set_num_threads(count)
        batch = anyflex.Packed(
            int32([0, *accumulate(q[i] for i in order)]),
            int32([kv[i] for i in order]),
            page_table=table,
            slots=int32(order),
        )
        out = anyflex.flex_attention_packed(
            torch.cat([rows[i] for i in order]),
            *pools,
            batch.begin(),
            slope,
            prefix,
            enable_gqa=True,
            backend="cpu",
        )
        return dict(zip(order, out.split([q[i] for i in order]), strict=True))

    together = run([2, 0, 3, 1], 2)
    for i in range(4):
        assert torch.equal(run([i], 1)[i], together[i])


def test_numbers_that_lead_outside_are_bounded() -> None:
    """A batch's tensors may be overwritten after they were checked: nothing is read or written
    outside of tensors, and padding rows are 0."""
    pools = torch.randn(2, 5, 2, 8, 16)
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    numbers = [int32([0, 2, 5]), int32([16, 9]), int32([0, 1]), int32([14, 6])]
    query = torch.randn(6, 2, 16)
    random_numbers = random.Random(1)
    for _ in range(200):
        offsets, lengths, slots, starts = (each.clone() for each in numbers)
        batch = anyflex.Packed(
            offsets, lengths, page_table=table, slots=slots, q_starts=starts, max_q=4, max_kv=16
        )
        step = batch.begin()
        anyflex.flex_attention_packed(query, *pools, step, None, prefix, backend="cpu")
        for each in (offsets, lengths, starts):
            each[random_numbers.randrange(len(each))] = random_numbers.choice(
                [-(2**31), -1, 3, 100, 2**31 - 1]
            )
        try:
            out = anyflex.flex_attention_packed(query, *pools, step, None, prefix, backend="cpu")
        except anyflex.ArgumentError:  # the last offset is looked at in each call
            continue
        assert out.isfinite().all()


@pytest.mark.parametrize("kind", ["tensor", "head", "token"])
@pytest.mark.parametrize("storage", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_stored_numbers_give_what_their_products_with_scales_give(
    storage: torch.dtype, kind: str, level: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    pools = [
        (torch.randn(60, 2, 16, 64, generator=generator) * 30).clamp(-127, 127).to(storage)
        for _ in "kv"
    ]
    shape = {"tensor": (), "head": (2,), "token": (60, 2, 16)}[kind]
    scales = [torch.rand(shape, generator=generator) / 30 for _ in "kv"]
    dims = {"tensor": 0, "head": 2, "token": 1}[kind]
    wide = [
        pool.float() * scale.view([*shape, *[1] * dims])
        for pool, scale in zip(pools, scales, strict=True)
    ]
    lengths = [37, 230, 1, 0]
    table = torch.randperm(60, generator=generator).view(4, 15).int()
    query = torch.randn(1 + 160 + 3 + 1, 8, 64, generator=generator)
    found = []
    for key, value, given in (
        (*pools, {"k_scale": scales[0], "v_scale": scales[1]}),
        (*wide, {}),
    ):
        batch = anyflex.Packed(int32([0, 1, 161, 164, 165]), int32(lengths), page_table=table)
        found.append(
            anyflex.flex_attention_packed(
                query,
                key,
                value,
                batch.begin(),
                slope,
                prefix,
                enable_gqa=True,
                backend="cpu",
                **given,
            )
        )
    torch.testing.assert_close(*found, rtol=0, atol=2e-5)
