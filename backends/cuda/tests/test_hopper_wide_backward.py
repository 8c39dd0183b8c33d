"""Hopper's backward above head dim 128, its source run in Python in random order, against the
dense formula."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed")

from backward_problem import Problem
from gluon_in_python import Box, Pointer, Stuck, run_kernel
from scripts_beside import SOAK

from anyflex_cuda import (
    apply_mods,
    hopper_backward,
    hopper_wide_backward,
    smem_mailbox,
    split_tiles,
    write_softmax_stats,
)
from anyflex_triton import tiles

MORE = (
    tiles, write_softmax_stats, smem_mailbox, apply_mods, split_tiles,
    hopper_backward,
)  # fmt: skip
Widths = tuple[int, ...]


class Case:
    """One call, drawn at random.

    Args:
        seed: of all that is drawn.
        fixed: values that aren't drawn.
    """

    def __init__(self, seed: int, **fixed: Any) -> None:
        pick = random.Random(seed)

        def drawn(name: str, *values: Any) -> Any:
            value = pick.choice(values)
            return fixed.get(name, value)

        self.seed = seed
        # Widths of tiles' parts; narrow ones suffice here.
        self.parts: Widths = drawn("parts", (32,), (16, 8))
        self.value_parts: Widths = drawn("value_parts", (32,), (16, 8), (16,))
        self.batch = drawn("batch", 1, 2)
        self.kv_heads = drawn("kv_heads", 1, 2)
        self.group = drawn("group", 1, 2)
        self.kv_shared = drawn("kv_shared", False, False, True)
        self.rows = drawn("rows", 64, 128, 200, 300, 1)
        self.keys = drawn("keys", 128, 256, 300, 65)
        self.q_block = drawn("q_block", 128, 256)
        self.kv_block = drawn("kv_block", 64, 128)
        self.has_mask = drawn("has_mask", True, True, False)
        self.has_mask_mod = self.has_mask and drawn("has_mask_mod", True, True, False)
        self.has_score_mod = drawn("has_score_mod", True, False)
        self.head_group = drawn("head_group", 1, 2)
        self.odd_key = drawn("odd_key", None)
        self.low = drawn("low", False)
        # Number of query heads of a split, or None where KV heads aren't split.
        self.split_heads = drawn("split_heads", None, None, 1, 2)
        self.problem = Problem(
            seed, pick, (sum(self.parts), sum(self.value_parts)), self.batch, self.kv_heads,
            self.group, self.kv_shared, self.rows, self.keys, (self.q_block, self.kv_block),
            self.has_mask, self.has_mask_mod, self.has_score_mod, self.odd_key,
            self.low,
        )  # fmt: skip

    def run(
        self, changed: tuple[str, str] = ("", "")
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield (name, the kernels' result, the formula's).

        Args:
            changed: argument of `run_kernel`.
        """
        problem = self.problem
        values = problem.row_values()
        padded = values.shape[2]
        given = {
            **_boxes("query", problem.q, self.parts), **_boxes("key", problem.k, self.parts),
            **_boxes("value", problem.v, self.value_parts),
            **_boxes("dout", problem.do, self.value_parts),
            "Q_BLOCK": self.q_block, "KV_BLOCK": self.kv_block, "head_group": self.head_group,
            "D": sum(self.parts), "DV": sum(self.value_parts),
        }  # fmt: skip
        past_end = bool(self.keys % 64)

        units, tiles = problem.kv_batch * self.kv_heads, -(-self.keys // 64)
        dk, dv = np.full(problem.k.shape, np.nan), np.full(problem.v.shape, np.nan)
        odd = np.full((units, tiles), 7)
        splits = None
        if self.split_heads is not None:
            splits = -(-(self.batch * problem.heads // units) // self.split_heads)
        D, DV = sum(self.parts), sum(self.value_parts)
        sums = np.full((units, splits or 1, tiles * 64, D + DV), np.nan)
        self._run(
            units * (splits or 1) * tiles,
            {
                **problem.arguments(transposed=True), **given,
                **_boxes("dk", dk, self.parts), **_boxes("dv", dv, self.value_parts),
                **dict.fromkeys(("dq", "dq_2", "odd_rows", "padded_length")), "OF_QUERIES": False,
                "row_values": Box(values.reshape(-1, padded), (1, 64), 4),
                "odd_keys": Pointer(odd), "units": units * (splits or 1), "tiles": tiles,
                "key_sums": None if splits is None else Pointer(sums),
                "head_splits": splits, "split_heads": self.split_heads,
                "RAGGED": past_end or (self.has_score_mod and bool(self.rows % 64)),
            },
            changed,
        )  # fmt: skip
        if splits is not None:
            assert np.isnan(dk).all() and np.isnan(dv).all() and (odd == 0).all()
            added = sums.sum(1)[:, : self.keys]
            dk[:] = added[..., :D].reshape(dk.shape) * problem.scale
            dv[:] = added[..., D:].reshape(dv.shape)
        yield "dk", dk, problem.wanted["dk"]
        yield "dv", dv, problem.wanted["dv"]
        if splits is None:
            yield "odd keys", odd, problem.odd("dk", 64)

        units, tiles = self.batch * problem.heads, -(-self.rows // 128)
        dq = np.full(problem.q.shape, np.nan)
        odd = np.full((units, tiles * 2), 7)
        self._run(
            units * tiles,
            {
                **problem.arguments(transposed=False), **given, **_boxes("dq", dq, self.parts),
                **dict.fromkeys(("dk", "dk_2", "dv", "dv_2", "odd_keys")), "OF_QUERIES": True,
                **dict.fromkeys(("key_sums", "head_splits", "split_heads")),
                "row_values": Pointer(values), "odd_rows": Pointer(odd), "units": units,
                "padded_length": padded, "tiles": tiles, "RAGGED": past_end,
            },
            changed,
        )  # fmt: skip
        yield "dq", dq, problem.wanted["dq"]
        halves = np.zeros(odd.shape, bool)
        found = problem.odd("dq", 64)
        halves[:, : found.shape[1]] = found
        yield "odd rows", odd, halves

    def _run(self, programs: int, arguments: dict[str, Any], changed: tuple[str, str]) -> None:
        run_kernel(
            hopper_wide_backward, "wide_kernel", programs, arguments, self.seed, changed, MORE,
        )  # fmt: skip


def _boxes(name: str, array: np.ndarray, parts: Widths) -> dict[str, Box | None]:
    """Return descriptors of both parts."""
    first, *rest = (Box(array, (1, 1, 64, columns)) for columns in parts)
    return {name: first, f"{name}_2": rest[0] if rest else None}


def check(case: Case, changed: tuple[str, str] = ("", "")) -> None:
    for name, found, wanted in case.run(changed):
        np.testing.assert_allclose(found, wanted, atol=1e-9, rtol=1e-9, err_msg=name)


@pytest.mark.parametrize("seed", range(4))
def test_gradients_that_are_nan_are_found(seed: int) -> None:
    case = Case(seed, has_score_mod=True, keys=300, odd_key=70, split_heads=None)
    found = {name: (ours, wanted) for name, ours, wanted in case.run()}
    assert 0 < found["odd keys"][1].sum() < found["odd keys"][1].size
    assert found["odd rows"][1].any()
    check(case)


def test_far_rows_are_made_again_though_their_gradients_may_be_finite() -> None:
    case = Case(0, rows=200, keys=128, has_score_mod=False, has_mask=False, split_heads=None)
    values = case.problem.row_values()
    values[0, :, 70] = np.nan
    case.problem.row_values = lambda: values  # type: ignore[method-assign]
    found = {name: ours for name, ours, _ in case.run()}
    np.testing.assert_array_equal(found["odd rows"], [[0, 1, 0, 0]] * len(found["odd rows"]))
    assert found["odd keys"].all()


@pytest.mark.parametrize("seed", range(16 if SOAK else 6))
def test_random_calls_in_random_orders_agree_with_the_dense_formula(seed: int) -> None:
    check(Case(seed))


@pytest.mark.parametrize("seed", range(8 if SOAK else 2))
def test_splits_of_query_heads_add_up_to_the_dense_formula(seed: int) -> None:
    check(Case(seed, group=3, split_heads=1 + seed % 2, kv_shared=seed % 4 > 1))


PIECES = [
    ("    if it >= SLOTS:\n", "    if False:\n"),
    ('named_barrier("sync", OF_FIRST + last % STAGES, 288, 1)', "pass"),
    ('named_barrier("sync", OF_SECOND + last % SECOND_SLOTS, 288, 1)', "pass"),
    ("mbarrier.wait(full.index(slot), (it // full.shape[0]) & 1, pred=there)", "pass"),
    ("pred=there", "pred=True"),
    ("mbarrier.wait(call.own_full, 0)", "pass"),
    ("mbarrier.wait(memory.second_full.index(slot), (it // STAGES) & 1)", "pass"),
    ("tma.store_wait(0)", "pass"),
    ('named_barrier("sync", TAKEN + slot, 256)', "pass"),
    ('named_barrier("arrive", TAKEN + slot, 256)', "pass"),
    ('named_barrier("sync", TAKEN + last % STAGES, 256)', "pass"),
    ('named_barrier("sync", PLACED + slot, 256)', "pass"),
    ('named_barrier("arrive", PLACED + slot, 256)', "pass"),
    ('named_barrier("sync", PLACED, 256)', "pass"),
    ('named_barrier("arrive", PLACED, 256)', "pass"),
    ("found | said(call.words, 0)", "found"),
    ("PLACED + slot", "PLACED"),
    ('named_barrier("arrive", OF_FIRST + slot, 288)\n    mbarrier', "mbarrier"),
    ('named_barrier("arrive", OF_SECOND + slot, 288)', "pass"),
    ('named_barrier("arrive", OF_SECOND, 288)', "pass"),
    ('named_barrier("arrive", OF_FIRST + slot, 288)\n    return dk', "return dk"),
    ('named_barrier("arrive", OF_FIRST + slot, 288)\n    return dq', "return dq"),
    (
        "raw = warpgroup_mma_wait(num_outstanding=0,",
        "raw = warpgroup_mma_wait(num_outstanding=1,",
    ),
    (
        "    warpgroup_mma_wait(num_outstanding=0, deps=(raw,))\n    return acc",
        "    return acc",
    ),
    ("num_outstanding=0, deps=(dweights,)", "num_outstanding=1, deps=(dweights,)"),
    ("dv = awaited(later, len(memory.first))", "dv = awaited(later, len(memory.first) + 1)"),
    ("dk = awaited(later, len(memory.second))", "dk = awaited(later, len(memory.second) + 1)"),
    ("dq = awaited(later, len(memory.first))", "dq = awaited(later, len(memory.first) + 1)"),
    ("gl.where((tile + 1) * 64 > grid.kv_length, 0, whole)", "whole"),
    ("return steps, grid.kv_length // STEP", "return steps, steps"),
    ("tile // TILES_A_BLOCK", "tile"),
    ("(bh, 3 * grid.batch * grid.heads + bh)", "(bh, bh)"),
    ("acc = all_inside(acc, own_first, call.grid.q_length)", "pass"),
]


@pytest.mark.parametrize(("piece", "instead"), PIECES[:: 1 if SOAK else 9])
def test_without_a_piece_of_its_protocol_a_kernel_fails(piece: str, instead: str) -> None:
    for seed in range(24):
        fixed = {"rows": 300, "keys": 300, "odd_key": 70 if "said" in piece else None}
        fixed["split_heads"] = None
        # Then scores of keys past the end, which are 0, are far above all others.
        fixed["low"] = "kv_length" in piece
        try:
            check(Case(seed, **fixed), (piece, instead))
        except (AssertionError, Stuck):
            return
    pytest.fail("every seed gave the right gradients")
