"""Hopper's decoding, its source run in Python in random order, against the dense formula."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed")

from gluon_in_python import Box, Pointer, Stuck, run_kernel
from scripts_beside import SOAK

from anyflex_cuda import (
    apply_mods,
    decode_parts,
    decode_steps,
    hopper_decode,
    nonfinite_rows,
    packed_steps,
    smem_mailbox,
    split_tiles,
    write_softmax_stats,
)
from anyflex_triton import forward, sequences, tiles

CALLED = (
    tiles, forward, sequences, decode_steps, packed_steps, nonfinite_rows, smem_mailbox,
    apply_mods,
    split_tiles, write_softmax_stats, decode_parts,
)  # fmt: skip
FULL = 1
MARK = 77 << 16


def softcap(score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return 3.0 * np.tanh(score / 3.0) + 0.01 * (k - q) * (h + 1)


def share_of(program: int, programs: int, total: int, groups: int) -> tuple[int, int]:
    group, member = divmod(program, programs // groups)
    least, more = divmod(total // groups, programs // groups)
    first = group * (total // groups) + member * least + min(member, more)
    return first, first + least + (member < more)


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
        self.block_n = drawn("block_n", 16, 32)
        self.stages = drawn("stages", 2, 3, 3, 5)
        self.width = drawn("width", 32, 64)
        self.dim = self.width - drawn("dim_less", 0, 0, 8)
        self.value_width = drawn("value_width", 32, 64)
        self.value_dim = self.value_width - drawn("value_dim_less", 0, 0, 8)
        self.batch = drawn("batch", 1, 2, 3)
        self.kv_heads = drawn("kv_heads", 1, 2, 3)
        self.group = drawn("group", 1, 2, 4, 8)
        self.kv_shared = drawn("kv_shared", False, False, True)
        self.rows = drawn("rows", 1, 1, 2, 3, 4)
        self.keys = drawn("keys", 1, 16, 64, 96, 100, 203, 256)
        self.plan = drawn("plan", 0, 1, 2)
        self.kv_block = drawn("kv_block", 16, 32, 24)
        self.has_mask_mod = self.plan > 0 and drawn("has_mask_mod", True, True, False)
        self.has_score_mod = drawn("has_score_mod", True, False)
        self.programs = drawn("programs", 1, 2, 3, 5, 11, 12, 40)
        self.adds = drawn("adds", True, True, False)
        units = self.batch * self.kv_heads
        self.groups = 1 if self.plan == 2 else math.gcd(units, self.programs)
        self.odd = drawn("odd", "", "", "value", "score")
        self.pick = pick

    def run(self, changed: tuple[str, str] = ("", ""), order: int = 0) -> np.ndarray:
        """Compare the kernel's output, or the sum of its parts, with the formula. Return its
        output.

        Args:
            changed: argument of `run_kernel`.
            order: seed of the order of events.
        """
        numbers = np.random.default_rng(self.seed)
        heads, rows, keys = self.kv_heads * self.group, self.rows, self.keys
        kv_batch = 1 if self.kv_shared else self.batch
        scale = 0.2
        q = numbers.standard_normal((self.batch, heads, rows, self.dim))
        k = numbers.standard_normal((kv_batch, self.kv_heads, keys, self.dim))
        v = numbers.standard_normal((kv_batch, self.kv_heads, keys, self.value_dim))
        if self.odd == "value":
            for what in (np.nan, np.inf, -np.inf):
                v[0, 0, numbers.integers(keys), numbers.integers(self.value_dim)] = what
        if self.odd == "score":
            q[-1, 0, 0, 1] = np.nan
            k[0, -1, numbers.integers(keys), 0] = np.nan
        at = (
            np.arange(self.batch).reshape(-1, 1, 1, 1), np.arange(heads).reshape(1, -1, 1, 1),
            np.arange(rows).reshape(-1, 1), np.arange(keys),
        )  # fmt: skip
        shifts = (3, 5, 7, 11)
        seen = tuple(x + shift for x, shift in zip(at, shifts, strict=True))
        modulus = self.pick.choice((2, 3, 97))

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, *_: Any) -> Any:
            return (q_idx * 3 + kv_idx * 5 + h) % modulus != 0

        live = np.ones((self.batch, heads, rows, keys), bool)
        entries = self.batch if self.plan == 2 else 1
        kinds = numbers.integers(0, 3, (entries, -(-keys // self.kv_block)))
        if self.pick.random() < 0.3:
            kinds[-1] = 0
        if not self.has_mask_mod:
            kinds = np.minimum(kinds, 1)
        edges, steps = self.listed(kinds)
        if self.plan:
            of_pair = kinds[:, at[3] // self.kv_block][:, None, None]
            live = np.broadcast_to(of_pair != 0, live.shape).copy()
            if self.has_mask_mod:
                live &= (of_pair == FULL) | mask_mod(*seen)

        unit_steps = -(-keys // self.block_n)
        each = np.diff(edges) if self.plan else np.array([unit_steps])
        of_units = np.repeat(np.broadcast_to(each, self.batch), self.kv_heads)
        places = 2 * self.programs
        # Counts and floats share memory, but a float has 64 bits here.
        units = self.batch * self.kv_heads
        counted = -(-units // 2) * 4
        partial = np.full(counted + places * self.group * rows * (self.value_dim + 3), 1e9)
        partial_out, partial_sums = (
            found.reshape(places, self.group * rows, -1)
            for found in np.split(partial[counted:], [places * self.group * rows * self.value_dim])
        )
        left = (0, MARK, MARK - 1, MARK + (1 << 16), -MARK, 1 << 62)
        counts = numbers.choice(left, units)
        out = np.full((self.batch, rows, heads, self.value_dim + 8), 1e9)
        sums = np.full((2, self.batch, heads, rows), 1e9)
        # Rows of queries are a multiple of 8 elements apart.
        padded = np.full((*q.shape[:3], self.width), np.nan)
        padded[..., : self.dim] = q
        run_kernel(
            hopper_decode,
            "decode_kernel",
            self.programs,
            {
                "k_desc": Box(k, (1, 1, self.block_n, self.width)),
                "v_desc": Box(v, (1, 1, self.block_n, self.value_width)),
                "query": Pointer(padded), "key": Pointer(k), "value": Pointer(v),
                "partial_out": Pointer(partial), "counts": Pointer(counts), "mark": MARK,
                "out": Pointer(out), "rest": Pointer(np.zeros(out.size)),
                "tops": Pointer(np.zeros((sums[0].size, 2))),
                "lse": Pointer(sums[0]), "max_scores": Pointer(sums[1]),
                "o_strides": (rows * out[0, 0].size, out.shape[3], out[0, 0].size, 1),
                "q_strides": tuple(stride // 64 for stride in padded.strides[:3]),
                "k_strides": tuple(stride // 8 for stride in k.strides[:3]),
                "v_strides": tuple(stride // 8 for stride in v.strides[:3]),
                "edges": Pointer(np.concatenate([edges, steps.ravel()])), "tables": (), "ints": (),
                "floats": (), "shifts": shifts, "scale": scale, "sinks": None, "batch": self.batch,
                "kv_heads": self.kv_heads, "q_length": rows, "most_rows": rows,
                "kv_length": keys, "sequences": None, "PAGE": 0, "ALONE": False,
                "unit_steps": unit_steps, "most": steps.shape[1], "groups": self.groups,
                "SCORE_MOD": softcap if self.has_score_mod else None,
                "MASK_MOD": mask_mod if self.has_mask_mod else None, "PLAN": self.plan,
                "GROUP": self.group, "KV_SHARED": self.kv_shared, "DIM": self.dim,
                "VALUE_DIM": self.value_dim, "D": self.width, "DV": self.value_width,
                "UNIT": 1, "ADDS": self.adds, "WANT_LSE": True, "WANT_MAX": True,
                "WANT_REST": True, "STAGES": self.stages, "BLOCK_N": self.block_n,
                "PRODUCER_REGISTERS": 24, "STORED": "plain", "ROWS": 64, "k_scale": None,
                "v_scale": None,
            },
            self.seed + 1000 * order,
            changed,
            CALLED,
        )  # fmt: skip

        # Find each program's part of a unit.
        total = int(of_units.sum())
        ends = np.cumsum(of_units)
        for unit, (end, count) in enumerate(zip(ends, of_units, strict=True)):
            shares = [
                share_of(program, self.programs, total, self.groups)
                for program in range(self.programs)
            ]
            parts = [
                2 * program + (begin <= end - count)
                for program, (begin, stop) in enumerate(shares)
                if max(end - count, begin) < min(end, stop)
            ]
            b, kv_head = divmod(unit, self.kv_heads)
            for packed in range(self.group * rows):
                h, row = kv_head * self.group + packed // rows, packed % rows
                place = 0 if self.kv_shared else b
                score = k[place, kv_head] @ q[b, h, row] * scale
                if self.has_score_mod:
                    score = softcap(score, b + 3, h + 5, row + 7, np.arange(keys) + 11)
                score = np.where(live[b, h, row], score, -np.inf)
                if self.adds or len(parts) == 1:
                    found = out[b, row, h, : self.value_dim]
                    compare_rows(score, v[place, kv_head], found, *sums[:, b, h, row])
                else:
                    found = partial_sums[parts, packed]
                    found[:, 0] *= 1.0 if self.has_score_mod else scale
                    compare_parts(score, v[place, kv_head], found, partial_out[parts, packed])
        # No program wrote elsewhere.
        written = (partial_sums != 1e9).any(axis=(1, 2)).sum()
        assert written <= self.programs + (of_units > 0).sum()
        assert (out[..., self.value_dim :] == 1e9).all() and (partial[:counted] == 1e9).all()
        # No count or mark is left: the next launch may get the same memory after something else
        # has written to a part of it.
        assert not self.adds or (counts[of_units > 0] == 0).all()
        return np.concatenate([out.ravel(), sums.ravel()])

    def listed(self, kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (edges, steps) as `decode_steps.steps_kernel` writes them, from kinds of blocks
        [entries, blocks of keys]."""
        found: list[list[tuple[int, int]]] = []
        for row in kinds:
            steps: list[tuple[int, int]] = []
            begin = 0
            while begin < len(row):
                end = begin + 1
                # A run may also end before the kind changes.
                while end < len(row) and row[end] == row[begin] and self.pick.random() < 0.9:
                    end += 1
                last = min(end * self.kv_block, self.keys)
                if row[begin]:
                    for first in range(begin * self.kv_block, last, self.block_n):
                        length = min(last - first, self.block_n)
                        steps.append((first, length * 2 + int(row[begin] == FULL)))
                begin = end
            found.append(steps)
        most = max(1, *map(len, found))
        table = np.full((len(found), most, 2), -(10**6))
        for row_steps, into in zip(found, table, strict=True):
            into[: len(row_steps)] = np.array(row_steps).reshape(-1, 2)
        return np.cumsum([0, *map(len, found)]), table


def compare_parts(score: np.ndarray, v: np.ndarray, sums: np.ndarray, values: np.ndarray) -> None:
    """Compare a row's parts with its scores."""
    seen = score != -np.inf
    odd = np.isnan(score).any()
    if not seen.any():
        assert (sums[:, 0] == -np.inf).all() and (sums[:, 1] == 0).all()
        assert (values == 0).all()
        return
    assert sums[:, 2].max() == odd
    top = np.fmax.reduce(sums[:, 0])
    factor = np.exp(sums[:, 0] - (0.0 if top == -np.inf else top))
    total = (factor * sums[:, 1]).sum()
    weights = np.exp(score[seen])
    assert np.isnan(total) == odd
    if odd:
        assert np.isnan((factor[:, None] * values).sum(0)).all()
        return
    np.testing.assert_allclose(np.exp(top) * total, weights.sum(), rtol=1e-9)
    np.testing.assert_allclose(top, score.max(), atol=1e-9)
    found = (factor[:, None] * values).sum(0) / total
    wanted = (weights[:, None] * v[seen]).sum(0) / weights.sum()
    np.testing.assert_allclose(found, wanted, atol=1e-9, rtol=1e-9)


def compare_rows(
    score: np.ndarray, v: np.ndarray, found: np.ndarray, lse: float, max_score: float
) -> None:
    """Compare a row's outputs with its scores."""
    seen = score != -np.inf
    if not seen.any():
        assert lse == max_score == -np.inf and (found == 0).all()
        return
    weights = np.exp(score[seen])
    np.testing.assert_allclose(lse, np.log(weights.sum()), atol=1e-9)
    np.testing.assert_allclose(max_score, score.max(), atol=1e-9)
    wanted = (weights[:, None] * v[seen]).sum(0) / weights.sum()
    np.testing.assert_allclose(found, wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("seed", range(60 if SOAK else 16))
def test_random_calls_in_random_orders_agree_with_the_dense_formula(seed: int) -> None:
    Case(seed).run()


@pytest.mark.parametrize("programs", [1, 2, 7, 40])
@pytest.mark.parametrize("plan", [0, 1, 2])
def test_shares_cross_units_and_some_programs_have_none(plan: int, programs: int) -> None:
    fixed = {"batch": 3, "kv_heads": 2, "keys": 100, "block_n": 16, "odd": ""}
    Case(plan, plan=plan, programs=programs, **fixed).run()


@pytest.mark.parametrize("plan", [0, 1, 2])
def test_sums_are_the_same_bits_whichever_program_ends_last(plan: int) -> None:
    fixed = {"batch": 2, "kv_heads": 1, "keys": 203, "block_n": 16, "programs": 11, "adds": True}
    found = [Case(plan, plan=plan, odd="", **fixed).run(order=order) for order in range(6)]
    assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("parts", [15, 16, 17, 40])
def test_any_number_of_parts_is_added_up(parts: int) -> None:
    fixed = {"batch": 1, "kv_heads": 1, "keys": 16 * parts, "block_n": 16, "programs": parts}
    Case(parts, plan=0, odd="", adds=True, group=8, rows=2, **fixed).run()


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("odd", ["value", "score"])
def test_any_packing_of_query_rows_keeps_what_is_not_finite_apart(
    group: int, rows: int, odd: str
) -> None:
    Case(group + rows, group=group, rows=rows, odd=odd, plan=1, has_mask_mod=True).run()


PIECES = [
    ("mbarrier.wait(ring.k_full.index(slot), phase)", "pass"),
    ("mbarrier.wait(ring.v_full.index(slot), phase)", "pass"),
    ("mbarrier.wait(ring.empty.index(slot), ((step // ring.STAGES) & 1) ^ 1)", "pass"),
    ("mbarrier.arrive(ring.empty.index(slot), count=1)", "pass"),
    ("((step // ring.STAGES) & 1) ^ 1", "(step // ring.STAGES) & 1"),
    ("say(ring.words, slot * WORDS, first)", "pass"),
    ("say(ring.words, slot * WORDS + 1, kind)", "pass"),
    ("num_outstanding=0, deps=(raw,)", "num_outstanding=1, deps=(raw,)"),
    ("num_outstanding=0, deps=(acc_later,)", "num_outstanding=1, deps=(acc_later,)"),
    ("is_nonfinite = gl.max((zeros != zeros).to(gl.int32), 0) > 0", "is_nonfinite = False"),
    ("ends * plan.kv_heads <= at", "ends * plan.kv_heads < at"),
    ("mask=inside)", "mask=packed >= 0)"),
    ("kind != BLOCK_N * 2 + 1:", "kind % 2 == 0:"),
    ("_all_threads()\n                if counted", "if counted"),
    ('sem="acq_rel"', 'sem="relaxed"'),
    ('cache_modifier=".cg"', 'cache_modifier=""'),
    ("gl.where(counts, found, mark)", "found"),
    (
        'gl.atomic_cas(word, found, gl.where(counts, found, mark), sem="relaxed")',
        "gl.store(word, gl.where(counts, found, mark))",
    ),
    ("== last_program - first_program:", "== 0:"),
    ("gl.store(call.counts + u, 0)", "pass"),
    ("if is_nonfinite | (part < count):", "if part < count:"),
    ("if count == 0:", "if False:"),
]


@pytest.mark.parametrize(("piece", "instead"), PIECES[:: 1 if SOAK else 4])
def test_without_a_piece_of_it_the_kernel_fails(piece: str, instead: str) -> None:
    for seed in range(12):
        fixed = {"batch": 2, "keys": 203, "plan": 2, "programs": 3, "block_n": 16, "stages": 2}
        try:
            Case(seed, odd="value", has_mask_mod=True, adds=True, **fixed).run((piece, instead))
        except (AssertionError, IndexError, Stuck):
            return
    pytest.fail("every seed gave the right sums")
