"""Whole forward calls on a stand-in Hopper GPU, whose kernel and mods run in Python, against the
reference."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from gluon_in_python import NotInSource, in_numpy, mod_in_python, run_kernel
from recording import OnHopper, check_half_outputs, recording
from scripts_beside import SOAK

import anyflex
from anyflex.plugin import PluginError, isolated, register
from anyflex.runtime.scalar_specialization import forget_numbers
from anyflex_cuda import (
    apply_mods,
    forward_call,
    hopper_forward,
    kernel,
    nonfinite_rows,
    skip_unit_rescale,
    smem_mailbox,
    split_tiles,
    write_softmax_stats,
)
from anyflex_cuda.tile_order import TileOrder
from anyflex_triton import forward, tiles
from anyflex_triton.building import Program, Programs

CALLED = (
    tiles, forward, smem_mailbox, apply_mods, nonfinite_rows, skip_unit_rescale,
    write_softmax_stats, split_tiles,
)  # fmt: skip
MODS = (
    "SCORE_MOD", "MASK_MOD", "READ_ROWS", "READ_COLUMNS", "SCORE_MOD_OF_READ", "MASK_SCORES",
    "READ_TILE", "READ_STEP",
)  # fmt: skip
LOWEST = torch.finfo(torch.float32).min
Mod = Callable[..., Any]
Offsets = tuple[int, int, int, int]


def bent(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * 0.5 + (k - q) * 0.01


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def packed(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Mask of documents of 170 tokens."""
    return (q // 170 == k // 170) & (q >= k)


def lowest(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Score mod like an additive mask: some rows' scores are all the lowest float."""
    return score + ((q % 5 == 0) | ((q >= 128) & (q < 192)) | (k % 7 == 0)) * LOWEST


def farther(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * 0.0 + (k // 40) * 300000.0


def documents(dtype: torch.dtype = torch.int32, count: int = 400) -> Mod:
    """Return a mask of documents of 37 tokens, and of other lengths for each batch entry from the
    second on."""
    ids = torch.arange(count).to(dtype).div(37, rounding_mode="floor")

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (ids[q] == ids[k]) & (q >= k)

    return mask_mod


def documents_of_batch() -> Mod:
    ids = torch.stack([torch.arange(400, dtype=torch.int32) // size for size in (37, 90, 61, 111)])

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ids[b, q] == ids[b, k]

    return mask_mod


def slopes() -> Mod:
    """Return a score mod that reads slopes by head, so nothing by column."""
    by_head = torch.linspace(0.01, 0.3, 8)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + by_head[h] * (k - q)

    return score_mod


def weighed() -> Mod:
    """Return a score mod that reads by key, so by column only."""
    by_key = torch.linspace(-1.0, 1.0, 400).sin() * 3

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + by_key[k]

    return score_mod


def t5(bidirectional: bool = True) -> Mod:
    """Return a score mod that reads a bucket by distance, and a number by bucket."""
    table = torch.linspace(-2.0, 2.0, 256).cos().view(32, 8) * 3
    return anyflex.mods.t5_bias(table, 100, bidirectional)


def by_distance() -> Mod:
    """Return a score mod that reads by distance from the end of a table, and scales by it."""
    table = torch.linspace(-4.0, 4.0, 8 * 2000).sin().view(8, 2000)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * 0.5 + table[h, q - k - 1000] * table[h, k + 3 - q + 900]

    return score_mod


def image(height: int, width: int) -> Mod:
    """Return a score mod that reads by row and by a key's place in an image."""
    rows = torch.arange(4 * 8 * 500.0).view(4, 8, 500, 1)
    of_height = (rows * 0.7 + torch.arange(40) * 1.3).sin().half()
    of_width = (rows * 0.3 + torch.arange(64) * 2.1).cos()

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + of_height[b, h, q, k // height] + of_width[b, h, q, k % width]

    return score_mod


def dense(size: tuple[int, ...], dtype: torch.dtype = torch.float16, first: int = 0) -> Mod:
    """Return a score mod that reads a number for each pair from [heads, rows, keys] or [rows,
    keys].

    Args:
        first: element of its memory where the table begins.
    """
    count = math.prod(size)
    numbers = (torch.arange(first + count) * 0.37).sin().mul(3).to(dtype)
    table = numbers[first:].view(size)
    if len(size) == 2:
        return lambda s, b, h, q, k: s * 0.5 + table[q, k]
    return lambda s, b, h, q, k: s + table[h, q, k]


def chosen_rows() -> Mod:
    """Return a score mod that reads rows of one table, which another one chooses, and of a third
    one."""
    number = (torch.arange(300) * 7) % 40
    rows = (torch.arange(40 * 384) * 0.21).sin().view(40, 384)
    others = (torch.arange(300 * 400) * 0.11).cos().mul(2).half().view(300, 400)
    return lambda s, b, h, q, k: s + rows[number[q], k] - others[q, k]


def everything(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Mask whose blocks are all FULL."""
    return (q >= 0) & (k >= 0)


def of_every_kind(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Mask of five key blocks, of which the first three are PARTIAL and the last is cut off."""
    return (k % 128 < 100) | (k >= 384)


def from_a_row_on(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Mask whose first block of rows has no keys, and the next ones PARTIAL and FULL blocks."""
    return (q >= 128) & ((k < 60) | (k >= 128))


def corner(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q < 100) & (k < 100)


def first_rows_see_all(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q < 128) | (k < 60)


@dataclass(frozen=True)
class Case:
    """A call with 4 query heads and 2 KV heads.

    Args:
        cores: number of concurrent programs.
        offsets: index offsets of the call.
        odd: whether some elements are non-finite.
        sinks: whether heads have sinks.
    """

    rows: int = 200
    keys: int = 200
    dims: tuple[int, int] = (64, 64)
    score: Mod | None = None
    mask: Mod | None = None
    block: int | tuple[int, int] = 128
    batch: int = 1
    cores: int = 3
    offsets: Offsets = (0, 0, 0, 0)
    odd: bool = False
    sinks: bool = False


AWAY = (1, 2, 30, 45)
CASES = {
    "three consumers": Case(300, 200, batch=2, cores=5),
    "three consumers, mask": Case(300, 300, mask=packed, block=192),
    "three consumers, columns": Case(score=weighed(), offsets=AWAY),
    "three consumers, not finite": Case(300, score=bent, odd=True),
    "two consumers, mods": Case(300, 300, (104, 40), bent, packed, batch=2, cores=5),
    "three consumers, far": Case(300, score=lowest, batch=2, cores=5),
    "two consumers, far": Case(300, 300, (72, 40), lowest, packed),
    "two consumers, farther": Case(300, 300, (128, 128), farther),
    "two consumers, far, not finite": Case(300, 300, (72, 40), lowest, packed, odd=True),
    "two consumers, not finite": Case(300, 300, (72, 40), bent, packed, odd=True),
    "one program, not finite": Case(300, 300, (128, 128), mask=packed, cores=1, odd=True),
    "where the queries were": Case(130, 140, (256, 256)),
    # The second part of the columns may not be filled.
    "two parts": Case(300, 300, (96, 96), bent, packed, batch=2, cores=5),
    "two parts of scores": Case(300, 300, (96, 96), mask=packed),
    "two parts, not finite": Case(300, 300, (72, 88), bent, packed, odd=True),
    "two parts, where the queries were": Case(130, 140, (136, 192)),
    "two parts of queries": Case(200, 140, (192, 128), mask=packed),
    "values of fewer columns than queries": Case(100, 140, (208, 136)),
    "two parts of queries, scored": Case(100, 140, (192, 96), bent, packed),
    "one part of queries, scored": Case(100, 140, (256, 96), bent),
    "two parts of values": Case(200, 140, (64, 96), bent, packed, cores=2),
    # There are as many programs as tiles of 64 rows.
    "one consumer": Case(300, 200, batch=2, cores=40),
    "one consumer, mods": Case(300, 300, (72, 40), bent, packed, batch=2, cores=40),
    "one consumer, blocks of 192": Case(300, 300, mask=packed, block=192, cores=20),
    "one consumer, not finite": Case(300, 300, (128, 128), bent, packed, cores=20, odd=True),
    "one consumer, far": Case(300, 300, (72, 40), lowest, packed, cores=20),
    "one consumer, where the queries were": Case(130, 140, (256, 256), cores=12),
    "one consumer, two parts": Case(130, 140, (96, 80), bent, cores=12),
    "one consumer, two parts, where the queries were": Case(130, 140, (192, 144), cores=12),
    "one consumer, documents, away": Case(
        200, 300, (128, 128), mask=documents(), offsets=AWAY, cores=16
    ),
    # With these head dims steps with dead pairs have a loop of their own. None, some or all steps
    # are such here.
    "all plain": Case(256, 384, (128, 128), mask=everything, batch=2),
    "plain but for the end": Case(200, 300, (128, 128), mask=everything),
    "of every kind": Case(130, 600, mask=of_every_kind),
    "no step, some, all": Case(300, 300, (128, 128), weighed(), from_a_row_on),
    "documents": Case(300, 300, (128, 128), mask=documents(count=300)),
    "documents of int64": Case(130, 300, mask=documents(torch.int64)),
    "documents, whole steps": Case(256, 256, (128, 128), mask=documents(count=256)),
    "documents, away": Case(200, 300, (128, 128), mask=documents(), offsets=AWAY),
    "documents of batch": Case(mask=documents_of_batch(), batch=2),
    "documents of batch, away": Case(mask=documents_of_batch(), batch=2, offsets=AWAY),
    # The first rows are the longest; "documents of batch" too have an order of their own.
    "first rows first": Case(500, 500, mask=first_rows_see_all, cores=2),
    "first rows first, blocks of 384": Case(
        800, 500, (128, 128), mask=first_rows_see_all, block=384
    ),
    "slopes": Case(score=slopes(), mask=causal, offsets=AWAY),
    "columns without a mask": Case(130, 256, (128, 128), weighed(), batch=2, offsets=AWAY),
    "distances": Case(300, 200, score=t5(), batch=2, cores=5),
    "distances, away": Case(300, 300, (128, 128), t5(False), causal, offsets=AWAY),
    "distances, one consumer": Case(100, 256, (72, 40), by_distance(), packed, cores=40),
    "distances, steps of 64": Case(130, 140, (256, 256), by_distance()),
    "an image": Case(200, 256, score=image(64, 64), batch=2, cores=5),
    "an image, one consumer": Case(200, 384, (128, 128), image(64, 64), cores=40),
    "an image, masked": Case(300, 384, score=image(32, 16), mask=packed, block=(192, 128)),
    "an image, away": Case(130, 256, score=image(256, 4), offsets=(1, 2, 30, 128)),
    "an image, steps of 64": Case(130, 256, (256, 256), image(128, 32)),
    "an image, not in steps": Case(130, 300, score=image(64, 64), offsets=AWAY),
    "an image, away from steps": Case(130, 256, score=image(64, 64), offsets=AWAY),
    "dense": Case(200, 256, score=dense((8, 200, 256)), batch=2, cores=5),
    "dense, one consumer": Case(130, 384, (128, 128), dense((130, 384)), cores=40),
    "dense, masked": Case(300, 300, score=dense((300, 304)), mask=packed, block=(192, 128)),
    "dense, away": Case(130, 200, (72, 40), dense((4 + 2, 160, 248)), offsets=(1, 2, 30, 48)),
    "dense, fewer rows": Case(300, 256, (256, 256), dense((100, 256), torch.float32), corner),
    "dense, chosen": Case(300, 384, (128, 128), chosen_rows(), packed),
    "dense, not aligned": Case(130, 300, score=dense((130, 300)), mask=packed),
    "dense, not aligned by offsets": Case(130, 200, score=dense((160, 248)), offsets=AWAY),
    "dense, not aligned in memory": Case(130, 256, score=dense((130, 256), first=4)),
    "dense, not aligned by blocks": Case(
        130, 300, score=dense((130, 304)), mask=packed, block=(128, 132)
    ),
    "dense, not aligned with fewer keys": Case(130, 256, score=dense((130, 128)), mask=corner),
    "documents, not finite": Case(300, 300, score=weighed(), mask=documents(), odd=True),
}


def moved(mod: Mod | None, offsets: Offsets) -> Mod | None:
    """Return a mod whose indices are offset."""
    if mod is None:
        return None
    return lambda *given: mod(
        *given[:-4], *(index + offset for index, offset in zip(given[-4:], offsets, strict=True))
    )


def watched(function: Callable[..., Any], case: Case) -> Callable[..., Any]:
    """Return a function that fails when called with rows or keys outside of the call."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    _, _, first_row, first_key = case.offsets
    bounds = {
        "q_idx": (first_row, first_row + case.rows), "kv_idx": (first_key, first_key + case.keys),
    }  # fmt: skip

    def called(*arguments: Any) -> Any:
        for name, indices in zip(names, arguments, strict=True):
            if name in bounds:
                first, end = bounds[name]
                assert first <= np.min(indices) and np.max(indices) < end, name
        return function(*arguments)

    return called


def check(case: Case, changed: tuple[str, str] = ("", ""), seed: int = 0) -> int:
    """Compare a call's outputs with the reference's, and return the kernel's consumers.

    Args:
        changed, seed: arguments of `run_kernel`.
    """
    ran = []

    def launch(
        program: Program, grid: int, device: torch.device, values: Mapping[str, Any]
    ) -> None:
        given = dict(program.constants)
        for name in MODS:
            if given[name] is not None:
                given[name] = watched(mod_in_python(given[name]), case)
        values["out"].fill_(torch.nan)
        given |= in_numpy({each: values[each] for each in program.types})
        run_kernel(hopper_forward, "forward_kernel", grid, given, seed, changed, CALLED)
        assert program.function.__name__ == "forward_kernel"
        ran.append(program.constants["CONSUMERS"])

    def launch_away(made: Any, sizes: Any, fit: Any, call: Any, *more: Any) -> None:
        """Launch with index offsets, which no public argument sets."""
        call = copy.copy(call)
        object.__setattr__(call, "index_offsets", case.offsets)
        forward_call.launch_forward(made, sizes, fit, call, *more)

    # Numbers of a mod are constants until another call has other ones.
    forget_numbers()
    torch.manual_seed(0)
    q = torch.randn(case.batch, case.rows, 4, case.dims[0]).half().transpose(1, 2)
    k, v = (torch.randn(case.batch, 2, case.keys, d).half() for d in case.dims)
    if case.odd:
        # Non-finite values are in several tiles of a program, and at both ends of a head.
        k[0, 1, 130, 5] = torch.nan
        v[0, 0, 20, 7], v[0, 1, 90, 1], v[-1, 0, -1] = torch.nan, -torch.inf, torch.inf
    score, mask_mod = moved(case.score, case.offsets), moved(case.mask, case.offsets)
    mask = given = None
    if mask_mod is not None:
        sizes: Any = (case.batch, None, case.rows, case.keys)
        mask = anyflex.create_block_mask(mask_mod, *sizes, BLOCK_SIZE=case.block)
        given = copy.copy(mask)
        given.mask_mod = case.mask
    sinks = torch.tensor([0.5, -torch.inf, 3.0, -1.0]) if case.sinks else None
    with isolated():
        register("cuda", OnHopper)
        with (
            torch.no_grad(),
            recording(),
            mock.patch.object(forward_call, "cores", lambda device: case.cores),
            mock.patch.object(Program, "launch", launch),
            mock.patch.object(kernel, "launch_forward", launch_away),
        ):
            out, lse = anyflex.flex_attention(
                q, k, v, case.score, given, enable_gqa=True, return_lse=True, sinks=sinks,
                backend="cuda",
            )  # fmt: skip
    (consumers,) = ran
    check_half_outputs(out, lse, q, k, v, score, mask, sinks)
    return int(consumers)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("name", list(CASES)[:: 1 if SOAK else 5])
def test_a_call_gives_what_the_reference_gives(name: str) -> None:
    consumers = check(CASES[name])
    for number, word in enumerate(("one", "two", "three"), 1):
        assert consumers == number or not name.startswith(f"{word} consumer")


def flags_of(name: str, flag: str) -> list[bool]:
    """Run a case, and return a constant of the mods of each of its kernels."""
    read = []
    mods_of = Programs.mods

    def noted(self: Programs, *given: Any) -> Any:
        found = mods_of(self, *given)
        read.append(vars(sys.modules[found.read_step.fn.__module__])[flag].value)
        return found

    with mock.patch.object(Programs, "mods", noted):
        check(CASES[name])
    return read


@pytest.mark.parametrize("name", [name for name in CASES if "image" in name][:: 1 if SOAK else 3])
def test_places_in_an_image_are_read_by_steps_that_begin_with_its_rows(name: str) -> None:
    assert flags_of(name, "STEADY") == ["steps" not in name or "64" in name]


@pytest.mark.parametrize("name", [name for name in CASES if "dense" in name][:: 1 if SOAK else 2])
def test_a_dense_bias_is_read_in_words_where_its_rows_are_whole_words(name: str) -> None:
    assert flags_of(name, "DENSE") == ["not" not in name]


WITH_SINKS = ["three consumers", "two consumers, far, not finite", "no step, some, all"]


@pytest.mark.parametrize("name", WITH_SINKS)
def test_sinks_take_their_part_of_each_row(name: str) -> None:
    check(replace(CASES[name], sinks=True))


@pytest.mark.parametrize("cores", [1, 4] if SOAK else [4])
def test_tiles_are_those_that_the_order_names(cores: int) -> None:
    """The order is drawn for each batch entry and head. Outputs are right in any order, and a tile
    that the order doesn't name isn't written."""
    case = Case(300, 300, (128, 128), mask=documents_of_batch(), batch=2, cores=cores)
    some = torch.tensor([[0, 1, 2], [2, 0, 1], [1, 2, 0], [1, 0, 2], [2, 1, 0]])
    order = some[torch.arange(8) % 5].view(2, 4, 3).to(torch.int32)
    with mock.patch.object(forward_call, "tile_order", lambda *_: TileOrder(order, (12, 3))):
        check(case)
    absent = torch.tensor([[0, 1, 2, 0], [2, 1, 0, 1]])
    named = torch.where(order == absent[..., None], (order + 1) % 3, order)
    seen = []

    def outputs(out: torch.Tensor, *_: Any) -> None:
        seen.append(out)

    with (
        mock.patch.object(forward_call, "tile_order", lambda *_: TileOrder(named, (12, 3))),
        mock.patch.dict(globals(), check_half_outputs=outputs),
    ):
        check(case)
    written = seen[0].isfinite().all(-1)
    for tile in range(3):
        there = written[:, :, tile * 128 : tile * 128 + 128]
        assert torch.equal(there, (absent != tile)[..., None].expand_as(there))


READ_EARLY = [
    ("documents", "gl.minimum(first + gl.arange(0, BLOCK_N, layout=LAYOUT), kv_length - 1)",
     "first + gl.arange(0, BLOCK_N, layout=LAYOUT)"),
    ("documents, away", "inputs.h, keys + mods.shifts[3],", "inputs.h, keys,"),
    ("documents of batch, away", "inputs.b, inputs.h, keys +",
     "inputs.b - mods.shifts[0], inputs.h - mods.shifts[1], keys +"),
    ("documents of batch, away", "READ_ROWS(mod_b,", "READ_ROWS(b,"),
    ("slopes", "READ_ROWS(mod_b, mod_h,", "READ_ROWS(mod_b, h,"),
    ("documents", "if call.READ_ROWS is not None:", "if False:"),
    ("distances, away", "first_q=first_row + q_shift", "first_q=first_row"),
    ("distances, away", "inputs.first_q, first + mods.shifts[3]", "inputs.first_q, first"),
    ("dense, away", "first + mods.shifts[3], inputs.read", "first, inputs.read"),
    ("an image, away", "READ_TILE(mod_b, mod_h,", "READ_TILE(b, h,"),
    ("columns without a mask", "    if ALWAYS:\n", "    if False:\n"),
]  # fmt: skip
LOOPS = [
    ("all plain", "range(gl.maximum(masked, 1), steps)", "range(masked, steps)"),
    ("of every kind", "range(gl.maximum(masked, 1), steps)", "range(1, steps)"),
    ("of every kind", "range(1, masked if APART else steps)", "range(1, 1)"),
    (
        "of every kind",
        "masked = said(call.step_words, slot * WORDS + 2) >= 0",
        "masked = False",
    ),
]
PROTOCOL = [
    ("two consumers, mods", f"{piece}\n", "pass\n")
    for piece in (
        "mbarrier.wait(ring.k_empty.index(slot), phase)",
        "mbarrier.wait(ring.v_empty.index(slot), phase)",
        "mbarrier.wait(k_empty.index(earlier % STAGES), (earlier // STAGES) & 1)",
        "mbarrier.wait(ring.k_full.index(slot), (step // ring.STAGES) & 1)",
        "mbarrier.wait(ring.v_full.index(before), ((step - 1) // ring.STAGES) & 1)",
        "mbarrier.wait(queries.full.index(place), (turn // queries.SLOTS) & 1)",
        "mbarrier.arrive(ring.k_empty.index(slot), count=1)",
        "mbarrier.arrive(ring.v_empty.index(before), count=1)",
        "tma.store_wait(0)",
    )
]


PIECES = [*READ_EARLY, *LOOPS, *PROTOCOL]


@pytest.mark.parametrize(("name", "piece", "instead"), PIECES[:: 1 if SOAK else 6])
def test_without_a_piece_of_it_a_call_fails(name: str, piece: str, instead: str) -> None:
    for seed in range(12):
        case = replace(CASES[name], cores=1 + seed % 2)
        try:
            check(case, (piece, instead), seed)
        except (AssertionError, PluginError) as error:
            assert not isinstance(error.__cause__, NotInSource), piece
            return
    pytest.fail("every seed gave the right outputs")
