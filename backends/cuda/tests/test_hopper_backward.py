"""Hopper's backward, its source run in Python in random order, against the dense formula."""

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
    smem_mailbox,
    split_tiles,
    write_softmax_stats,
)
from anyflex_triton import tiles

MORE = (tiles, write_softmax_stats, smem_mailbox, apply_mods, split_tiles)


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
        self.block_m = drawn("block_m", 64, 128)
        self.width = drawn("width", 64) if self.block_m == 128 else drawn("width", 64, 128)
        self.value_width = 64 if self.block_m == 128 else drawn("value_width", 64, 128)
        self.batch = drawn("batch", 1, 2)
        self.kv_heads = drawn("kv_heads", 1, 2)
        self.group = drawn("group", 1, 2, 3)
        self.kv_shared = drawn("kv_shared", False, False, True)
        self.rows = drawn("rows", 64, 128, 200, 300, 1)
        self.keys = drawn("keys", 128, 256, 300, 65)
        self.q_block = drawn("q_block", 128, 256)
        self.has_mask = drawn("has_mask", True, True, False)
        self.has_mask_mod = self.has_mask and drawn("has_mask_mod", True, True, False)
        self.has_score_mod = drawn("has_score_mod", True, False)
        self.want_dq = drawn("want_dq", True, True, True, False)
        self.dynamic = drawn("dynamic", True, True, False)
        self.programs = drawn("programs", 1, 2, 3)
        self.head_group = drawn("head_group", 1, 2)
        self.odd_key = drawn("odd_key", None)
        # Number of query heads of a split, or None where KV heads aren't split.
        self.split_heads = drawn("split_heads", None, None, 1, 2)
        self.pick = pick

    def run(
        self, changed: tuple[str, str] = ("", "")
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield (name, the kernel's result, the formula's).

        Args:
            changed: argument of `run_kernel`.
        """
        problem = Problem(
            self.seed, self.pick, (self.width, self.value_width), self.batch, self.kv_heads,
            self.group, self.kv_shared, self.rows, self.keys, (self.q_block, 128), self.has_mask,
            self.has_mask_mod, self.has_score_mod, self.odd_key,
        )  # fmt: skip
        D, DV, block_m = self.width, self.value_width, self.block_m
        values = problem.row_values()
        padded = values.shape[2]
        tiles, units = -(-self.keys // 128), problem.kv_batch * self.kv_heads
        dk, dv = np.full(problem.k.shape, np.nan), np.full(problem.v.shape, np.nan)
        splits = None
        if self.split_heads is not None:
            splits = -(-(self.batch * problem.heads // units) // self.split_heads)
        sums = np.full((units, splits or 1, tiles * 128, D + DV), np.nan)
        dq = np.zeros((self.batch * problem.heads, padded * D // 32, 32))
        odd = np.full((units, tiles * 2), 7)
        ragged = bool(self.keys % 128) or (self.has_score_mod and bool(self.rows % block_m))
        run_kernel(
            hopper_backward,
            "backward_kernel",
            self.programs,
            {
                **problem.arguments(transposed=True),
                "query": Box(problem.q, (1, 1, block_m, D)),
                "dout": Box(problem.do, (1, 1, block_m, DV)),
                "key": Box(problem.k, (1, 1, 64, D)), "value": Box(problem.v, (1, 1, 64, DV)),
                "dk": Box(dk, (1, 1, 64, D)), "dv": Box(dv, (1, 1, 64, DV)),
                "row_values": Box(values.reshape(-1, padded), (1, block_m), 4),
                "dq_sums": Box(dq, (1, 128, 32), 4), "odd_keys": Pointer(odd),
                "counter": Pointer(np.zeros(1, int)), "totals": (),
                "key_sums": None if splits is None else Pointer(sums),
                "head_splits": splits, "split_heads": self.split_heads,
                "units": units * (splits or 1), "tiles": tiles, "head_group": self.head_group,
                "CAPTURED_GRADIENTS": None,
                "Q_BLOCK": self.q_block, "KV_BLOCK": 128, "RAGGED": ragged,
                "READ_STEP": None, "WANT_DQ": self.want_dq, "BLOCK_M": block_m, "D": D, "DV": DV,
                "DYNAMIC": self.dynamic,
            },
            self.seed,
            changed,
            MORE,
        )  # fmt: skip
        if splits is not None:
            assert np.isnan(dk).all() and np.isnan(dv).all() and (odd == 0).all()
            added = sums.sum(1)[:, : self.keys]
            dk[:] = added[..., :D].reshape(dk.shape) * problem.scale
            dv[:] = added[..., D:].reshape(dv.shape)
        yield "dk", dk, problem.wanted["dk"]
        yield "dv", dv, problem.wanted["dv"]
        halves = np.zeros((units, tiles * 2), bool)
        found = problem.odd("dk", 64)
        halves[:, : found.shape[1]] = found
        if splits is None:
            yield "odd", odd, halves
        if self.want_dq:
            found = summed_rows(dq, D)[:, : self.rows].reshape(problem.q.shape)
            yield "dq", found * problem.scale, problem.wanted["dq"]


def summed_rows(sums: np.ndarray, width: int) -> np.ndarray:
    """Return [B * H, rows, width] from sums in the order of threads, element by element: in
    wgmma's layout a thread has 2 neighbours of each 8 columns, in a row and in the 8th row after
    it."""
    flat = sums.reshape(len(sums), -1, width // 64, 128, 32)
    found = np.empty((len(sums), flat.shape[1], 64, width))
    for row in range(64):
        for column in range(64):
            thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
            # Eight threads with 4 elements each fill a row of 32.
            place = column // 8 * 16 + thread // 32 * 4 + row % 8 // 2
            inside = row % 2 * 16 + thread % 4 * 4 + row % 16 // 8 * 2 + column % 2
            found[:, :, row, column::64] = flat[:, :, :, place, inside]
    return found.reshape(len(sums), -1, width)


def check(case: Case, changed: tuple[str, str] = ("", "")) -> None:
    for name, found, wanted in case.run(changed):
        np.testing.assert_allclose(found, wanted, atol=1e-9, rtol=1e-9, err_msg=name)


@pytest.mark.parametrize("seed", range(0 if SOAK else 2, 4))
def test_one_key_whose_gradient_is_nan_is_found(seed: int) -> None:
    case = Case(seed, has_score_mod=True, keys=300, odd_key=70, split_heads=None)
    found = {name: (ours, wanted) for name, ours, wanted in case.run()}
    assert 0 < found["odd"][1].sum() <= len(found["odd"][1])
    check(case)


@pytest.mark.parametrize("seed", range(24 if SOAK else 4))
def test_random_calls_in_random_orders_agree_with_the_dense_formula(seed: int) -> None:
    check(Case(seed))


@pytest.mark.parametrize("seed", range(8 if SOAK else 2))
def test_splits_of_query_heads_add_up_to_the_dense_formula(seed: int) -> None:
    check(Case(seed, group=3, split_heads=1 + seed % 2, kv_shared=seed % 4 > 1))


WAIT = "tma.store_wait(0)"
LAST_DQ = """            if not ALONE:
                dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
"""
LOADED = "# halves of the keys: the next tile may be loaded.\n"
COMMENT = (
    "            # TMA has stored dV, and all of this consumer's warps have the dQ that reads "
    "both\n"
    f"            {LOADED}"
)
OWN_DK = "            if not SPLIT:\n                dk_tile"
FREE = f"""            {WAIT}
            mbarrier.arrive(keys.empty, count=1)
"""


PIECES = [
    (f"{LOADED}            {WAIT}", "pass"),
    (f"{WAIT}\n{OWN_DK}", f"pass\n{OWN_DK}"),
    (f"# Wait until TMA has read the previous dQ from this buffer.\n    {WAIT}", "pass"),
    (f"index = said(keys.words, 0)\n    {WAIT}", "index = said(keys.words, 0)"),
    (f"k_tiles.index(ME))\n            {WAIT}", "k_tiles.index(ME))"),
    ("reinterpret(dq_tiles.index(ME)", "reinterpret(dq_tiles.index(1 - ME)"),
    (LAST_DQ + COMMENT + FREE, FREE + LAST_DQ),
    ("propagate_nan=tl.PropagateNan.ALL", ""),
    ("wait_for_ds(it - 1, last_rows >= 0, ME)\n            place", "place"),
    ("wait_for_ds(it - 1, last_rows >= 0, ME)\n            dq", "dq"),
    ('named_barrier("arrive", OF_DS + 2 * (it & 1) + (1 - ME), 256)', "pass"),
    ("OF_DS + 2 * (it & 1) + (1 - ME)", "OF_DS + (1 - ME)"),
    ("DS_STAGES = gl.constexpr(3)", "DS_STAGES = gl.constexpr(2)"),
    ("if last_rows >= 0:", "if True:"),
    ("last_rows = (m0", "last_rows = (128 + m0"),
    ("mbarrier.wait(memory.q_full.index(slot), (it // STAGES) & 1, pred=there)", "pass"),
    ("pred=there", "pred=True"),
    ("if start < stop:", "if True:"),
    ("mbarrier.wait(memory.do_full.index(slot), phase)", "pass"),
    ("    if it >= STAGES:\n", "    if False:\n"),
    ("mbarrier.wait(keys.empty, (count & 1) ^ 1)", "pass"),
    ("mbarrier.wait(keys.full, count & 1)", "pass"),
    ("mbarrier.arrive(keys.empty, count=1)", "pass"),
    ('named_barrier("arrive", OF_ROWS + slot, 288)', "pass"),
    ("await_rows(last % STAGES)", "pass"),
    ("mbarrier.arrive(keys.full, count=1)", "pass"),
    ("tma.store_wait(0)", "pass"),
    ("place = it % DS_STAGES", "place = 0"),
    ("=0, deps=(raw,))\n    mbarrier", "=1, deps=(raw,))\n    mbarrier"),
    ("    warpgroup_mma_wait(num_outstanding=0, deps=(raw,))\n    return", "    return"),
    ("num_outstanding=0, deps=(dq, dv)", "num_outstanding=1, deps=(dq, dv)"),
    ("num_outstanding=1, deps=(dq, dv)", "num_outstanding=2, deps=(dq, dv)"),
    ("num_outstanding=0, deps=(dq,)", "num_outstanding=1, deps=(dq,)"),
    ("num_outstanding=1, deps=(dk, dv)", "num_outstanding=2, deps=(dk, dv)"),
    ("live = live | full", "pass"),
    ("gl.minimum(end, whole), begin)", "end, begin)"),
]


@pytest.mark.parametrize(("piece", "instead"), PIECES[:: 1 if SOAK else 12])
def test_without_a_piece_of_its_protocol_the_kernel_fails(piece: str, instead: str) -> None:
    for seed in range(24):
        fixed = {"rows": 300, "keys": 300, "want_dq": seed % 4 < 3, "q_block": 128}
        fixed |= {"programs": 1 + seed % 2, "split_heads": None}
        # Some gradients of one key are NaN.
        fixed["odd_key"] = 70 if "nan" in piece else None
        # Consumers make a step's dQ by columns, by rows, or each from its own keys.
        block_m, width = ((64, 128), (128, 64), (64, 64))[seed % 3]
        fixed |= {"block_m": block_m, "width": width}
        try:
            check(Case(seed, **fixed), (piece, instead))
        except (AssertionError, Stuck):
            return
    pytest.fail("every seed gave the right sums")
