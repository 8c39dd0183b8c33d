"""Which decoding calls Hopper's kernel takes, what the others are told, and what is launched."""

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
from anyflex_cuda.decode_call import DecodeTiles
from anyflex_cuda.decode_steps import ALL, EACH, NONE
from anyflex_cuda.kernel import CudaKernel

KERNELS = ["anyflex_cuda.hopper_decode", "anyflex_cuda.decode_sums"]
STEPS = "anyflex_cuda.decode_steps"
PORTABLE = {"anyflex_triton.decode"}
ONE, MANY = (2, 8, 1, 128), (2, 2, 16384, 128)
"""Shapes of query, and of key and value."""


def decoded(q: Tensor, k: Tensor, v: Tensor, *mods: Any) -> tuple[list[Any], str]:
    return launches(q, k, v, *mods, enable_gqa=True)


def first_half(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < 3000 + 1000 * b


def test_a_few_query_rows_are_decoded_by_two_programs_a_core() -> None:
    launched, said = decoded(*drawn(ONE, MANY, MANY))
    assert [of(launch) for launch in launched] == KERNELS
    assert f"hopper decode programs={2 * CORES}" in said


def test_programs_share_all_steps_and_have_a_place_for_each_part() -> None:
    (parts, sums), _ = decoded(*drawn(ONE, MANY, MANY))
    program, grid, values = parts
    assert grid == 2 * CORES and program.constants["PLAN"] == NONE.value
    assert (values["batch"], values["kv_heads"], values["unit_steps"]) == (2, 2, 16384 // 64)
    assert program.constants["GROUP"] == 4
    # Heads lie 128 elements apart, in units of 8.
    assert values["q_strides"] == (8 * 128 // 8, 128 // 8, 0)
    # Values, then sums.
    assert values["partial_out"].shape == ((2 * CORES + 4) * 4 * (128 + 3),)
    assert sums[1] == 2 * 8 and sums[2]["programs"] == grid


def test_little_work_has_few_programs() -> None:
    (parts, _), said = decoded(*drawn((1, 8, 1, 128), *[(1, 2, 500, 128)] * 2))
    assert parts[1] == 2 * 8 * 64 // 128 and "programs=8" in said
    (parts, _), _ = decoded(*drawn((1, 8, 1, 128), *[(1, 2, 1, 128)] * 2))
    assert parts[1] == 1


def test_lengths_and_batches_compile_decoding_once_and_its_sums_twice() -> None:
    """For few parts a warp, for many four."""
    programs = []
    with isolated():
        register("cuda", OnHopper)
        with recording() as launched:
            for batch, keys in ((1, 1000), (1, 32768), (2, 4096), (5, 1024), (5, 70)):
                q, k = drawn((batch, 8, 1, 128), (batch, 8, keys, 128))
                anyflex.flex_attention(q, k, k, backend="cuda")
            programs += [program for program, *_ in launched]
    assert len(set(programs[::2])) == 1 and len(set(programs[1::2])) == 2


def test_steps_of_a_mask_are_listed_before() -> None:
    mask = anyflex.create_block_mask(first_half, None, None, 1, 16384)
    q, k, v = drawn(ONE, MANY, MANY)
    (steps, parts, _), _ = decoded(q, k, v, None, mask)
    assert of(steps) == STEPS and steps[1] == 2
    assert parts[0].constants["PLAN"] == ALL.value
    each = anyflex.create_block_mask(first_half, 2, None, 1, 16384)
    (steps, parts, sums), _ = decoded(q, k, v, lambda s, b, h, i, j: s * 2.0, each)
    assert steps[1] == 3 and steps[2]["edges"].shape == (3 + 2 * 256 * 2,)
    assert sums[2]["edges"] is parts[2]["edges"] is steps[2]["edges"]
    assert parts[0].constants["PLAN"] == sums[0].constants["PLAN"] == EACH.value
    assert parts[0].constants["SCORE_MOD"] is not None


def test_runs_that_end_within_a_step_have_room_for_one_more_each() -> None:
    mask = anyflex.create_block_mask(first_half, 2, None, 1, 16384, BLOCK_SIZE=32)
    (steps, _, _), _ = decoded(*drawn(ONE, MANY, MANY), None, mask)
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


# One kernel serves them all; what one call was answered must not answer the next.
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
    return anyflex.create_block_mask(row_by_row, *sizes)


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
    assert modules["contiguous", "no mask"] == set(KERNELS)
    assert modules["rows", "for each entry"] == {STEPS, *KERNELS}
    assert modules["many rows", "for all"] == {"anyflex_cuda.hopper_forward"}
    unmasked = [alone[name, "no mask"] for name in IN_TURN if "elsewhere" not in name]
    assert all(a != b for i, a in enumerate(unmasked) for b in unmasked[:i])


def test_what_is_kept_of_a_call_holds_none_of_its_tensors() -> None:
    mask = anyflex.create_block_mask(first_half, None, None, 1, 16384)
    with isolated():
        register("cuda", OnHopper)
        with recording() as launched:
            for mods in ((), (None, mask)):
                tensors = drawn(ONE, MANY, MANY)
                out = anyflex.flex_attention(*tensors, *mods, backend="cuda", enable_gqa=True)
                alive = [weakref.ref(tensor) for tensor in (*tensors, out)]
                alive += [weakref.ref(launched[0][2]["partial_out"])]
                del tensors, out
                launched.clear()
                assert [tensor() for tensor in alive] == [None] * 5


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
            for _, call, out in (*given[:2], *given):
                given[1][0].workspace(given[1][1], "forward")
                launched.clear()
                kernel.forward(call, out)
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
