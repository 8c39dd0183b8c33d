"""Routing of decoding: which calls Hopper's kernel takes, what explain says of the others, and
what is launched."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="there is no Triton to launch with")

from recording import CORES, OnHopper, recording
from test_routing import (
    drawn,
    each_of,
    facts,
    heads_last,
    launches,
    of,
    off_by_two_bytes,
    strided,
)

import anyflex
from anyflex.plugin import isolated, register
from anyflex_cuda import decode_call
from anyflex_cuda.decode_call import DecodeTiles
from anyflex_cuda.decode_steps import ALL, EACH, NONE
from anyflex_cuda.kernel import CudaKernel

KERNEL, SUMS = "anyflex_cuda.hopper_decode", "anyflex_cuda.decode_sums"
STEPS = "anyflex_cuda.decode_steps"
PORTABLE = {"anyflex_triton.decode"}
ONE, MANY = (2, 8, 1, 128), (2, 2, 16384, 128)
"""Shapes of query, and of key and value."""


def decoded(q: Tensor, k: Tensor, v: Tensor, *mods: Any) -> tuple[list[Any], str]:
    return launches(q, k, v, *mods, enable_gqa=True)


def first_half(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < 3000 + 1000 * b


def first_third(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < 3000


def test_a_few_query_rows_are_decoded_by_two_programs_a_core() -> None:
    launched, said = decoded(*drawn((1, 24, 1, 128), *[(1, 6, 11264, 128)] * 2))
    assert [of(launch) for launch in launched] == [KERNEL]
    assert f"hopper decode programs={2 * CORES}" in said


def test_programs_share_all_steps_and_have_a_place_for_each_part() -> None:
    ((program, grid, values),), _ = decoded(*drawn(ONE, MANY, MANY))
    # Each has 256 steps and 66 programs; 64 programs have equally long shares.
    assert grid == 4 * 64 and values["groups"] == 4 and program.constants["ADDS"] is True
    assert program.constants["PLAN"] == NONE.value
    assert (values["batch"], values["kv_heads"], values["unit_steps"]) == (2, 2, 16384 // 64)
    assert program.constants["GROUP"] == 4
    # Heads are 128 elements apart, counted in units of 8.
    assert values["q_strides"] == (8 * 128 // 8, 128 // 8, 0)
    # The workspace has counts in 64 bits, values, and sums.
    assert values["partial_out"].shape == (4 * 2 + 2 * grid * 4 * (128 + 3),)
    assert values["counts"] is values["partial_out"]


@pytest.mark.parametrize(
    ("batch", "keys", "programs", "groups"),
    [
        (1, 32768, 256, 8),  # 32 programs a head, 16 steps each
        (16, 8192, 256, 128),  # 2 a head
        (64, 4096, 256, 256),  # 2 heads each
        (16, 8200, 256, 128),
        (12, 4096, 264, 24),  # 192, as many as heads divide, would be too few
        (50, 4096, 264, 8),  # 400 heads
    ],
)
def test_shares_end_where_heads_do_if_that_takes_most_programs(
    batch: int, keys: int, programs: int, groups: int
) -> None:
    shapes = (batch, 32, 1, 128), *[(batch, 8, keys, 128)] * 2
    ((_, grid, values),), _ = decoded(*(torch.empty(s, dtype=torch.bfloat16) for s in shapes))
    assert (grid, values["groups"]) == (programs, groups)


def test_where_a_heads_parts_have_many_rows_a_kernel_of_its_own_adds_them_up() -> None:
    launched, _ = decoded(*drawn((1, 16, 4, 128), *[(1, 1, 16384, 128)] * 2))
    assert [of(launch) for launch in launched] == [KERNEL, SUMS]
    (parts, sums) = launched
    assert parts[0].constants["ADDS"] is False and sums[1] == 64
    assert sums[2]["programs"] == parts[1] and sums[2]["groups"] == 1


def test_little_work_has_few_programs() -> None:
    (parts,), said = decoded(*drawn((1, 8, 1, 128), *[(1, 2, 500, 128)] * 2))
    assert parts[1] == 2 * 8 * 64 // 128 and "programs=8" in said
    (parts,), _ = decoded(*drawn((1, 8, 1, 128), *[(1, 2, 1, 128)] * 2))
    assert parts[1] == 1


def test_lengths_and_batches_compile_decoding_once() -> None:
    programs = []
    with isolated():
        register("cuda", OnHopper)
        with recording() as launched:
            for batch, keys in ((1, 1000), (1, 32768), (2, 4096), (5, 1024), (5, 70)):
                q, k = drawn((batch, 8, 1, 128), (batch, 8, keys, 128))
                anyflex.flex_attention(q, k, k, backend="cuda")
            programs += [program for program, *_ in launched]
    assert len(programs) == 5 and len(set(programs)) == 1


def test_steps_of_a_mask_are_listed_before() -> None:
    mask = anyflex.create_block_mask(first_third, None, None, 1, 16384)
    q, k, v = drawn(ONE, MANY, MANY)
    (steps, parts), _ = decoded(q, k, v, None, mask)
    assert of(steps) == STEPS and steps[1] == 2
    assert parts[0].constants["PLAN"] == ALL.value
    each = anyflex.create_block_mask(first_half, 2, None, 1, 16384)
    # One batch entry may have nearly all steps.
    with mock.patch.object(decode_call, "_MOST_ADDED", (2 * CORES // 2 + 2) * 4 - 1):
        launched, _ = decoded(q, k, v, lambda s, b, h, i, j: s * 2.0, each)
    steps, parts, sums = launched
    assert steps[1] == 3 and steps[2]["edges"].shape == (3 + 2 * 256 * 2,)
    assert sums[2]["edges"] is parts[2]["edges"] is steps[2]["edges"]
    assert parts[0].constants["PLAN"] == sums[0].constants["PLAN"] == EACH.value
    assert parts[0].constants["SCORE_MOD"] is not None
    assert parts[1] == 2 * CORES and parts[2]["groups"] == 1


def test_runs_that_end_within_a_step_have_room_for_one_more_each() -> None:
    mask = anyflex.create_block_mask(first_half, 2, None, 1, 16384, BLOCK_SIZE=32)
    (steps, *_), _ = decoded(*drawn(ONE, MANY, MANY), None, mask)
    assert steps[2]["edges"].shape == (3 + 2 * (256 + 512) * 2,)


def per_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < 3000 + h


SHAPE = (1, 2, 256, 64)
ELSEWHERE: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "float32": (
        lambda: drawn((1, 2, 1, 64), SHAPE, SHAPE, dtype=torch.float32), "wgmma takes",
    ),
    "wide": (lambda: drawn((1, 2, 1, 192), *[(1, 2, 256, 192)] * 2), "head dims above 128"),
    "broadcast keys": (
        lambda: [*drawn((1, 2, 1, 64)), drawn((1, 1, 256, 64))[0].expand(SHAPE), *drawn(SHAPE)],
        "TMA loads no boxes of key",
    ),
    "a mask for each head": (
        lambda: [
            *drawn((1, 2, 1, 64), SHAPE, SHAPE), None,
            anyflex.create_block_mask(per_head, None, 2, 1, 256),
        ],
        "each head has a mask of its own",
    ),
    "no keys": (lambda: drawn((1, 2, 1, 64), *[(1, 2, 0, 64)] * 2), "key is empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_it_does_not_take_is_portable_and_explain_says_why(name: str) -> None:
    arguments, reason = ELSEWHERE[name]
    launched, said = decoded(*arguments())
    assert {of(launch) for launch in launched} == PORTABLE
    assert "not Hopper's kernel" in said and reason in said


# One kernel serves all these calls; a cached decision about one must not be applied to the next.
IN_TURN: dict[str, Callable[[], list[Tensor]]] = {
    "contiguous": lambda: drawn((2, 8, 1, 64), *[(2, 2, 512, 64)] * 2),
    "queries heads last": lambda: [
        heads_last(2, 8, 1, 64),
        *drawn(*[(2, 2, 512, 64)] * 2),
    ],
    "keys heads last": lambda: [
        *drawn((2, 8, 1, 64)), *each_of(2, heads_last, 2, 2, 512, 64),
    ],
    "only values heads last": lambda: [
        *drawn((2, 8, 1, 64), (2, 2, 512, 64)), heads_last(2, 2, 512, 64),
    ],
    "more keys": lambda: drawn((2, 8, 1, 64), *[(2, 2, 1024, 64)] * 2),
    "odd keys": lambda: drawn((2, 8, 1, 64), *[(2, 2, 500, 64)] * 2),
    "more heads": lambda: drawn((2, 16, 1, 64), *[(2, 4, 512, 64)] * 2),
    "larger batch": lambda: drawn((3, 8, 1, 64), *[(3, 2, 512, 64)] * 2),
    "one entry": lambda: drawn((1, 8, 1, 64), *[(1, 2, 512, 64)] * 2),
    "rows": lambda: drawn((2, 8, 3, 64), *[(2, 2, 512, 64)] * 2),
    "more rows": lambda: drawn((2, 8, 5, 64), *[(2, 2, 512, 64)] * 2),
    "half of each row": lambda: [
        strided((2, heads, rows, 64), 128) for heads, rows in ((8, 1), (2, 512), (2, 512))
    ],
    "queries elsewhere in memory": lambda: [
        off_by_two_bytes(2, 8, 1, 64), *drawn(*[(2, 2, 512, 64)] * 2),
    ],
    "values elsewhere in memory": lambda: [
        *drawn((2, 8, 1, 64), (2, 2, 512, 64)), off_by_two_bytes(2, 2, 512, 64),
    ],
    "many rows": lambda: drawn((2, 8, 128, 64), *[(2, 2, 512, 64)] * 2),
}  # fmt: skip


def row_by_row(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < 300 + q + h + b


MASKS: dict[str, Callable[[int, int, int], tuple[Any, ...]]] = {
    "no mask": lambda batch, rows, keys: (),
    "for all": lambda batch, rows, keys: (None, mask_of(None, None, rows, keys)),
    "for each entry": lambda batch, rows, keys: (None, mask_of(batch, None, rows, keys)),
    "for each head": lambda batch, rows, keys: (None, mask_of(None, 8, rows, keys)),
}


def mask_of(*sizes: Any) -> Any:
    made = anyflex.create_block_mask(row_by_row, *sizes)
    # User-made blocks of one entry and head are broadcast to all.
    return anyflex.BlockMask.from_runs(
        made.offsets, made.runs, seq_lengths=made.seq_lengths, mask_mod=row_by_row
    )


def test_calls_of_other_shapes_strides_and_masks_are_answered_for_themselves() -> None:
    def posed(name: str, mask: str) -> tuple[Any, ...]:
        q, k, v = IN_TURN[name]()
        if q.shape[1] != 8:
            mask = "no mask"
        return q, k, v, *MASKS[mask](q.shape[0], q.shape[2], k.shape[2])

    posing = [(name, mask) for name in IN_TURN for mask in MASKS]
    alone = {key: [facts(launch) for launch in decoded(*posed(*key))[0]] for key in posing}
    with isolated():
        register("cuda", OnHopper)
        with recording() as launched:
            for key in [*posing, *reversed(posing)]:
                launched.clear()
                anyflex.flex_attention(*posed(*key), backend="cuda", enable_gqa=True)
                assert [facts(launch) for launch in launched] == alone[key], key
    modules = {key: {module for module, *_ in found} for key, found in alone.items()}
    for name, mask in posing:
        if "elsewhere" in name or (
            mask == "for each head" and name not in ("more heads", "many rows")
        ):
            assert modules[name, mask] == PORTABLE, (name, mask)
    assert modules["contiguous", "no mask"] == {KERNEL}
    assert modules["rows", "for each entry"] == {STEPS, KERNEL}
    assert modules["many rows", "for all"] == {"anyflex_cuda.hopper_forward"}
    unmasked = [alone[name, "no mask"] for name in IN_TURN if "elsewhere" not in name]
    assert all(a != b for i, a in enumerate(unmasked) for b in unmasked[:i])


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("rows", [1, 256])
def test_what_is_kept_of_a_call_holds_none_of_its_tensors(rows: int, hopper: bool) -> None:
    mask = anyflex.create_block_mask(first_third, None, None, rows, 16384)
    options = {"cuda": {"hopper": hopper}}
    batch, heads, _, dim = ONE
    with isolated():
        register("cuda", OnHopper)
        with recording() as launched:
            for mods in ((), (None, mask)):
                tensors = drawn((batch, heads, rows, dim), MANY, MANY)
                out = anyflex.flex_attention(
                    *tensors, *mods, backend="cuda", enable_gqa=True, kernel_options=options
                )
                alive = [weakref.ref(tensor) for tensor in (*tensors, out)]
                del tensors, out
                launched.clear()
                # The workspace belongs to core, which caches small ones of the CPU, whose tensors
                # stand in for the GPU's.
                assert [tensor() for tensor in alive] == [None] * 4


def test_a_call_is_run_as_itself_whoever_asked_in_between() -> None:
    given: list[Any] = []

    def noted(kernel: CudaKernel, call: Any, out: Any) -> None:
        given.append((kernel, call, out))

    with isolated():
        register("cuda", OnHopper)
        with recording() as launched:
            with mock.patch.object(CudaKernel, "forward", noted):
                for name in ("contiguous", "more keys", "queries elsewhere in memory"):
                    tensors = IN_TURN[name]()
                    anyflex.flex_attention(*tensors, backend="cuda", enable_gqa=True)
            kernel = given[0][0]
            assert all(other is kernel for other, _, _ in given[:2])
            found = []
            for taken_by, call, out in (*given[:2], *given):
                kernel.workspace(given[1][1], "forward")
                launched.clear()
                taken_by.forward(call, out)
                found.append([facts(launch) for launch in launched])
            alone = [
                [facts(launch) for launch in decoded(*IN_TURN[name]())[0]]
                for name in ("contiguous", "more keys")
            ]
    assert found[:2] == found[2:4] == alone
    assert {module for module, *_ in found[4]} == PORTABLE


def test_an_option_of_the_portable_kernels_is_not_ignored() -> None:
    options = {"kernel_options": {"cuda": {"block_n": 32}}}
    launched, said = launches(*drawn(ONE, MANY, MANY), enable_gqa=True, **options)
    assert {of(launch) for launch in launched} == PORTABLE and "have block_n" in said


def test_registers_are_shared_among_the_programs_of_a_multiprocessor() -> None:
    found = [DecodeTiles(64, 3, programs).most_registers for programs in (1, 2)]
    assert found == [248, 128]
