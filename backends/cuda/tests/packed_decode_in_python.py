"""Whole decoding calls of packed sequences without a GPU: as `decode_in_python`, with keys in
pages or packed. Run as a script by `test_whole_packed_decode`, with TRITON_INTERPRET=1.

Prints one line per call. Rows that no sequence has, and what lies behind a sequence's keys, are
NaN and infinity; ids of pages past a length are garbage.
"""

from __future__ import annotations

import importlib
import inspect
import math
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from backward_in_python import InPython, Mod
from decode_in_python import CALLED
from gluon_in_python import Pointer, in_numpy, mod_in_python, run_kernel
from interpreting import hasten
from scripts_beside import SOAK
from test_hopper_calls import CALLED as CALLED_BY_FORWARD
from test_hopper_calls import MODS
from torch import Tensor

import anyflex
from anyflex.plugin import isolated, register
from anyflex.testing import posing
from anyflex_cuda import (
    decode_call,
    forward_call,
    hopper_decode,
    hopper_forward,
    packed_decode_call,
    packed_steps,
    packed_tile_list,
    packed_tiles,
)
from anyflex_cuda.gluon_launch import GluonProgram
from anyflex_triton import sequences, tiles
from anyflex_triton.building import Program

SIMULATED = packed_steps.share_kernel, packed_tile_list.tile_kernel
"""Kernels in plain Triton that run where its interpreter may not be on."""
# No public name leads there: users can't ask for a device's structures on a CPU.
row_blocks = importlib.import_module("anyflex.packed.row_blocks")


@dataclass(frozen=True)
class Case:
    """One call.

    Args:
        lengths: (query rows, keys) of each sequence.
        page: rows of a page; 0: keys are packed.
        heads: number of query heads, of KV heads.
        score, mask: functions that work with torch and numpy alike.
        spare: rows behind the last sequence's.
        starts: position of each first query row; None: queries end where keys do.
        odd: whether some elements are non-finite.
        rows_first: whether a pool's rows lie before its heads.
        cores: number of multiprocessors.
        most_added, most_parts: as in `decode_in_python.Case`.
        stored: type of keys and values in 8 bits, or None.
        scales: what has a scale of its own: "tensor", "head", or "token", a token and head.
    """

    name: str
    lengths: tuple[tuple[int, int], ...] = ((1, 100), (1, 17), (1, 64), (1, 130))
    page: int = 16
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    score: Mod | None = None
    mask: Mod | None = None
    spare: int = 0
    starts: tuple[int, ...] | None = None
    odd: bool = False
    rows_first: bool = False
    cores: int = 3
    most_added: int = 320
    most_parts: int = 64
    stored: torch.dtype | None = None
    scales: str = "token"


def by_slot(score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return score * 0.5 + (k - q) * 0.01 + b * 0.125


def causal(b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return q >= k


def window(b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return (q >= k) & (q - k < 70 + b)


def nothing(b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return (k < 0) & (q == q)


HALF, FLOAT8 = torch.float16, torch.float8_e4m3fn
EDGES = ((1, 0), (0, 40), (1, 1), (2, 15), (1, 16), (3, 17), (1, 63), (0, 0), (1, 65))
CASES = [
    Case("plain"),
    Case("edges of pages", EDGES, spare=5),
    Case("pages of 48", page=48, dims=(128, 128)),
    Case("pages of 64, many programs", ((1, 1500), (1, 64)), page=64, cores=20),
    Case("pages of 128, wide rows", page=128, dims=(72, 128), rows_first=True),
    Case("packed", EDGES, page=0, spare=2),
    Case("packed, mods", page=0, score=by_slot, mask=causal, lengths=((3, 200), (1, 90))),
    Case("summed after", ((1, 900), (2, 300)), cores=9, most_added=0, spare=1),
    Case("mask", ((1, 500), (2, 300), (0, 9), (4, 2)), score=by_slot, mask=window),
    Case("mask, summed after", ((1, 500), (2, 300)), mask=window, most_added=0, cores=9),
    Case("few parts at a time", ((1, 1500),), most_added=0, most_parts=2, cores=20),
    Case("negative positions", ((5, 2), (3, 90)), mask=causal, heads=(7, 1)),
    Case("dead under a mask", EDGES, mask=nothing, page=32),
    Case("own starts", ((2, 90), (1, 130)), mask=causal, starts=(30, 0), score=by_slot),
    Case("sixteen heads", ((4, 100), (1, 200)), heads=(16, 1), page=32, most_added=0),
    Case("odd", odd=True, rows_first=True),
    Case("odd, packed, mask", odd=True, page=0, mask=window),
    Case("equal", ((1, 128),) * 6, page=64),
    Case("beside long ones", ((1, 90), (140, 200), (2, 65), (33, 40)), mask=causal, spare=3),
    Case("long ones alone", ((40, 40), (35, 70), (150, 150)), page=0, mask=causal),
    Case("beside long ones, packed", ((1, 90), (0, 3), (140, 200), (2, 0)), page=0, spare=3),
    Case("int8", EDGES, spare=5, stored=torch.int8, score=by_slot),
    Case("float8, packed", EDGES, page=0, stored=FLOAT8, spare=2, dims=(64, 128)),
    Case("int8, one scale", page=64, stored=torch.int8, scales="tensor", mask=window),
    Case("float8, a scale a head", ((3, 900), (2, 90)), stored=FLOAT8, scales="head", cores=9),
    Case("float8, odd", odd=True, stored=FLOAT8, rows_first=True),
    Case("int8, odd, packed", odd=True, page=0, stored=torch.int8, mask=window),
]


def drawn(seed: int) -> Case:
    """Return a random case."""
    pick = random.Random(seed)
    stored = random.Random(-seed).choice([None, torch.int8, FLOAT8])
    group, kv_heads = pick.choice([(1, 3), (4, 2), (7, 1), (8, 1), (16, 1)])
    most = (64 if stored is None else 32) // group
    page = pick.choice([0, 16, 32, 48, 64, 96, 256])
    keys = [0, 1, 15, 16, 17, 63, 64, 65, page, page + 1, pick.randrange(700)]
    return Case(
        f"random {seed}",
        tuple(
            (pick.choice([0, 1, 1, min(2, most), min(4, most)]), pick.choice(keys))
            for _ in range(pick.choice([1, 2, 5, 9]))
        )
        + ((1, pick.choice(keys)),),
        page,
        (group * kv_heads, kv_heads),
        pick.choice([(64, 64), (40, 72) if stored is None else (48, 80), (128, 128)]),
        pick.choice([None, by_slot]),
        pick.choice([None, causal, window]),
        pick.choice([0, 3, 40]),
        rows_first=pick.choice([False, True]),
        cores=pick.choice([1, 3, 10]),
        most_added=pick.choice([0, 10**6]),
        most_parts=pick.choice([2, 64]),
        stored=stored,
        scales=pick.choice(["tensor", "head", "token"]),
    )


def in_python(
    case: Case, program: Program, grid: int, values: Mapping[str, Any], changed: tuple[str, str],
    seed: int,
) -> None:  # fmt: skip
    given: dict[str, Any] = {**program.constants}
    given |= in_numpy({name: values[name] for name in program.types})
    if program.function is packed_steps.share_kernel:
        own = changed if changed[0] in inspect.getsource(packed_steps) else ("", "")
        run_kernel(packed_steps, "share_kernel", grid, given, seed, own, CALLED[:4])
        return
    if program.function is packed_tile_list.tile_kernel:
        run_kernel(packed_tile_list, "tile_kernel", grid, given, seed, more=(tiles, sequences))
        return
    if program.function.__name__ == "forward_kernel":
        for name in MODS:
            if given[name] is not None:
                given[name] = mod_in_python(given[name])
        called = (*CALLED_BY_FORWARD, sequences, packed_tile_list, packed_tiles)
        run_kernel(hopper_forward, "forward_kernel", grid, given, seed, more=called)
        return
    given |= {"SCORE_MOD": case.score, "MASK_MOD": case.mask}
    memory = given["counts"].array
    given["counts"] = Pointer(memory[: memory.size // 2 * 2].view(np.int64))
    run_kernel(hopper_decode, "decode_kernel", grid, given, seed, changed, CALLED)


class Drawn(NamedTuple):
    """A call's numbers: queries [T, Hq, E], and each sequence's keys and values [Hkv, S, E] and
    their scales [Hkv, S, 1]."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    k_scales: list[Tensor]
    v_scales: list[Tensor]


def numbers_of(case: Case) -> Drawn:
    heads, kv_heads = case.heads
    rows = sum(count for count, _ in case.lengths)
    query = torch.cat([torch.randn(rows, heads, case.dims[0]).half()])
    query = torch.cat([query, poison(case.spare, heads, case.dims[0])])
    size = 40 if case.stored is torch.int8 else 1
    keys, values = (
        [
            (torch.randn(kv_heads, count, dim) * size).clamp(-127, 127).to(case.stored or HALF)
            for _, count in case.lengths
        ]
        for dim in case.dims
    )
    if case.odd and case.stored is not torch.int8:
        keys[0][0, 20, 5] = math.nan if case.stored else math.inf
        values[3][1, 99, 7] = math.nan
        values[1][0, 16, 1] = math.nan if case.stored else -math.inf
    k_scales, v_scales = (scales_of(case, kv_heads) for _ in range(2))
    if case.odd and case.scales == "token":
        k_scales[1][1, 3] = -math.inf
        v_scales[0][0, 20] = math.inf
        v_scales[3][1, 99] = math.nan
    return Drawn(query, keys, values, k_scales, v_scales)


def scales_of(case: Case, kv_heads: int) -> list[Tensor]:
    if case.scales != "token":
        each = torch.rand(kv_heads if case.scales == "head" else 1, 1, 1) / 20
        return [each.expand(kv_heads, count, 1) for _, count in case.lengths]
    found = [torch.rand(kv_heads, count, 1) / 20 for _, count in case.lengths]
    # Later keys' scales are larger, so that the sums' reference changes.
    return [x * (1 + torch.arange(x.shape[1])[:, None] / 50) for x in found]


def poison(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    if dtype is torch.int8:
        return torch.full(shape, 127, dtype=dtype)
    found = torch.full(shape, math.nan)
    if dtype is not FLOAT8:
        found[1::2] = math.inf
    return found.to(dtype)


def stored(case: Case, keys: list[Tensor]) -> Tensor:
    """Return packed rows [S, Hkv, E], or a pool of pages, from keys [Hkv, S, E] of sequences."""
    heads, _, dim = keys[0].shape
    dtype = keys[0].dtype
    if not case.page:
        rows = [y for x in keys for y in (x.transpose(0, 1), poison(3, heads, dim, dtype=dtype))]
        size = dtype.itemsize
        # torch joins no float8.
        return torch.cat([x if size > 1 else x.view(torch.int8) for x in rows]).view(dtype)
    pages = sum(-(-x.shape[1] // case.page) for x in keys) + 3
    pool = poison(pages, heads, case.page, dim, dtype=dtype)
    if case.rows_first:
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    for x, ids in zip(keys, table_of(case, pages), strict=True):
        for i, begin in enumerate(range(0, x.shape[1], case.page)):
            part = x[:, begin : begin + case.page]
            pool[ids[i], :, : part.shape[1]] = part
    return pool


def table_of(case: Case, pages: int) -> list[list[int]]:
    order = list(range(pages))
    random.Random(0).shuffle(order)
    return [[order.pop() for _ in range(-(-keys // case.page))] for _, keys in case.lengths]


def batch(case: Case, pages: int) -> anyflex.Packed:
    def ints(numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    rows, keys = zip(*case.lengths, strict=True)
    offsets = ints(np.cumsum([0, *rows]).tolist())
    starts = None if case.starts is None else ints(case.starts)
    if not case.page:
        ends = ints(np.cumsum([0, *(n + 3 for n in keys)]).tolist())
        return anyflex.Packed(offsets, ints(keys), kv_offsets=ends, q_starts=starts)
    ids = table_of(case, pages)
    width = max(map(len, ids)) + 2 * bool(case.spare)
    garbage = (2**31 - 1, -1, pages) * width
    table = ints([(*row, *garbage)[:width] for row in ids])
    return anyflex.Packed(offsets, ints(keys), page_table=table, q_starts=starts)


def dense(case: Case, drawn: Drawn) -> list[Tensor]:
    """Return out, lse and max_scores by the formula in float64: a call's that has numbers in 8
    bits, which the reference's core rounds to the queries' type first."""
    group = case.heads[0] // case.heads[1]
    rows = drawn.query.shape[0]
    out = torch.zeros(rows, case.heads[0], case.dims[1], dtype=torch.float64)
    lse, tops = (torch.full((rows, case.heads[0]), -math.inf).double() for _ in range(2))
    first = 0
    for i, (count, length) in enumerate(case.lengths):
        end = first + count
        q = drawn.query[first:end].double().transpose(0, 1)
        k, v = (
            (numbers[i].double() * scales[i].double()).repeat_interleave(group, 0)
            for numbers, scales in (
                (drawn.keys, drawn.k_scales), (drawn.values, drawn.v_scales),
            )
        )  # fmt: skip
        scores = q @ k.mT * case.dims[0] ** -0.5
        start = length - count if case.starts is None else case.starts[i]
        h, q_idx, kv_idx = (torch.arange(n) for n in scores.shape)
        at = i, h[:, None, None], q_idx[:, None] + start, kv_idx
        seen = torch.ones_like(scores, dtype=torch.bool)
        if case.score is not None:
            scores = case.score(scores, *at)
        if case.mask is not None:
            seen = case.mask(*at).expand(scores.shape)
        scores = scores.masked_fill(~seen, -math.inf)
        weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
        finite = torch.where(v.isfinite(), v, 0.0)
        # 0 * NaN is NaN: non-finite values reach only the rows that see them.
        others = (seen[..., None] * torch.where(v.isfinite(), 0.0, v)[:, None]).where(
            seen[..., None], 0.0
        )
        out[first:end] = (weights @ finite + others.sum(2)).transpose(0, 1)
        if length:
            lse[first:end] = scores.logsumexp(-1).T
            tops[first:end] = scores.amax(-1).T
        first = end
    return [out, lse, tops]


def outputs(
    case: Case, backend: str, changed: tuple[str, str] = ("", ""), seed: int = 0
) -> tuple[list[Tensor], list[str]]:
    """Return out, lse, max_scores, and names of kernels.

    Args:
        changed, seed: arguments of `run_kernel`.
    """
    torch.manual_seed(0)
    names: list[str] = []
    launch = Program.launch

    def launched(
        program: Program, grid: int, device: torch.device, values: Mapping[str, Any]
    ) -> None:
        names.append(program.function.__name__)
        if isinstance(program, GluonProgram) or program.function in SIMULATED:
            in_python(case, program, grid, values, changed, seed)
        else:
            launch(program, grid, device, values)

    found = numbers_of(case)
    pools = stored(case, found.keys), stored(case, found.values)
    more = {}
    for name, scales in (("k_scale", found.k_scales), ("v_scale", found.v_scales)):
        if case.stored is not None:
            some = max(scales, key=lambda x: x.shape[1])
            of_call = {"token": stored(case, scales)[..., 0], "head": some[:, 0, 0]}
            more[name] = of_call.get(case.scales, some[0, 0, 0])
    if backend == "dense":
        return dense(case, found), names
    with mock.patch.object(Program, "launch", launched):
        out, aux = anyflex.flex_attention_packed(
            found.query, *pools, batch(case, pools[0].shape[0]).begin(), case.score, case.mask,
            enable_gqa=True, backend=backend,
            return_aux=anyflex.AuxRequest(lse=True, max_scores=True), **more,
        )  # fmt: skip
    return [out, aux.lse, aux.max_scores], names


def check(case: Case, changed: tuple[str, str] = ("", ""), seed: int = 0) -> None:
    with (
        mock.patch.object(forward_call, "cores", lambda device: case.cores),
        mock.patch.object(decode_call, "_MOST_ADDED", case.most_added),
        mock.patch.object(packed_decode_call, "_MOST_ADDED", 10**6),
        mock.patch.object(decode_call, "_FEW_PARTS", min(decode_call._FEW_PARTS, case.most_parts)),
        mock.patch.object(decode_call, "_MOST_PARTS", case.most_parts),
    ):
        ours, names = outputs(case, "cuda.python", changed, seed)
    longest = max(rows for rows, _ in case.lengths)
    others = (
        ("tile_kernel", "forward_kernel") if longest > 64 * case.heads[1] // case.heads[0] else ()
    )
    steps = ("share_kernel",) if case.mask is None else ("list_kernel", "share_kernel")
    sums = () if case.most_added else ("combine_kernel",)
    assert tuple(names) == (*others, *steps, "decode_kernel", *sums), names
    wanted, _ = outputs(case, "dense" if case.stored else "reference")
    for found, right in zip(ours, wanted, strict=True):
        if case.odd and found is ours[0]:
            assert not np.isfinite(right.numpy()).all(), "a case without what it is about"
        np.testing.assert_allclose(found.numpy(), right.numpy(), atol=3e-3, rtol=3e-3)


def check_broken_bounds(offsets: list[int], keys: list[int]) -> None:
    """Check that steps of numbers on a device that break their bounds stay in their sequence's
    list, and have keys of its own alone."""
    count, bounds = len(keys), (int(max(np.diff(offsets))), 300)
    sizes = torch.tensor([offsets, [*keys, 0]], dtype=torch.int32)
    table = torch.zeros(count, 5, dtype=torch.int32)
    sound = anyflex.Packed(
        torch.arange(count + 1, dtype=torch.int32), torch.zeros_like(sizes[1, :-1]),
        page_table=table, max_q=bounds[0], max_kv=bounds[1],
    )  # fmt: skip
    sound.q_offsets.copy_(sizes[0])
    sound.kv_lengths.copy_(sizes[1, :-1])
    rows = max(offsets)
    blocks = row_blocks.static_row_blocks(sound, sound.q_offsets, rows)
    tiles, most = blocks.shape[0], 5
    # Behind the mask's last row of blocks stand runs of far more steps than a list has room for.
    begins = torch.arange(tiles + 1 + 200, dtype=torch.int32) * 3
    runs = torch.tensor([[0, 3, 1], [3, 9, 2], [9, 40, 2]] * len(begins), dtype=torch.int32)
    runs[3 * tiles :, :2] = torch.tensor([0, 4000])
    edges = torch.full((count + 3 + count * (1 + most * 2) + 10**5,), -7, dtype=torch.int32)
    given = (
        blocks, sound.q_offsets, sound.q_starts, sound.kv_lengths, sound.slots, sound.slots, table,
        sound.slots, count, 1, bounds[1], 1, 5, count, 0, bounds[0],
    )  # fmt: skip
    packed_steps.list_kernel[(count,)](
        begins, begins[1:], runs, (0, 0), given, edges, rows, tiles, 1, most, 0, 64, 128, 64
    )
    listed = edges[count + 3 :]
    counts, steps = listed[:count], listed[count : count * (1 + most * 2)].view(count, most, 2)
    assert (edges[: count + 3] == -7).all() and (listed[count * (1 + most * 2) :] == -7).all()
    for found, each, length in zip(counts.tolist(), steps.tolist(), keys, strict=True):
        assert 0 <= found <= most
        for key, size in each[:found]:
            assert size == 0 or 0 <= key < key + size // 2 <= min(length, 300)
        assert all(step == [-7, -7] for step in each[found:])


BROKEN = [
    ([0, *[1000, 0] * 10, 1], [300] * 21),  # falling: the sum of lengths exceeds the rows
    ([0, 1, 2, 3, 4], [300, 5000, -3, 2**31 - 1]),
    ([7, 3, 4, 90, 91], [17, 300, 0, 64]),
]


def main() -> int:
    hasten()
    for broken in BROKEN:
        check_broken_bounds(*broken)
    print("broken bounds: right", flush=True)
    with isolated(), posing("cuda"):
        register("cuda.python", InPython)
        for case in [*CASES, *map(drawn, range(30))] if SOAK else [*CASES[1::4], drawn(0)]:
            if len(sys.argv) < 2 or sys.argv[1] in case.name:
                check(case)
                print(f"{case.name}: right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
