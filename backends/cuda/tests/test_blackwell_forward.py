"""Blackwell's forward, its source run in Python, against the dense formula."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed")

from gluon_in_python import Box, Pointer, Stuck, mask_scores_of, run_kernel, runs_of
from scripts_beside import SOAK

from anyflex_cuda import (
    apply_mods,
    blackwell_forward,
    smem_mailbox,
    split_tiles,
    write_softmax_stats,
)
from anyflex_triton import forward, tiles


def softcap(score: Any, b: Any, h: Any, q: Any, k: Any, *_: Any) -> Any:
    return 9.0 * np.tanh(score / 9.0) + 0.01 * (k - q) * (h + 1)


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
        self.width = drawn("width", 64, 128)
        self.value_width = drawn("value_width", 64, 128)
        self.batch = drawn("batch", 1, 2)
        self.kv_heads = drawn("kv_heads", 1, 2)
        self.group = drawn("group", 1, 2)
        self.kv_shared = drawn("kv_shared", False, False, True)
        self.rows = drawn("rows", 64, 128, 256, 300, 500, 1)
        self.keys = drawn("keys", 128, 256, 512, 300, 65)
        self.q_block = drawn("q_block", 128, 128, 256, 384)
        self.kv_block = drawn("kv_block", 128, 128, 256, 64, 96)
        self.has_mask = drawn("has_mask", True, True, False)
        self.has_mask_mod = self.has_mask and drawn("has_mask_mod", True, True, False)
        self.has_score_mod = drawn("has_score_mod", True, False)
        self.stages = drawn("stages", 2, 2, 3)
        self.piece = drawn("piece", 32, 64)
        self.programs = drawn("programs", 1, 2, 3)
        self.head_group = drawn("head_group", 1, 2)
        # The larger scale makes the accumulator be rescaled.
        self.scale = drawn("scale", 0.2, 2.0)
        # Whether no tile has a step.
        self.blank = drawn("blank", False, False, False, False, True)
        self.odd = drawn("odd", False, False, False, True)
        self.pick = pick

    def run(
        self, changed: tuple[str, str] = ("", "")
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield (name, the kernel's result, the formula's).

        Args:
            changed: argument of `run_kernel`.
        """
        numbers = np.random.default_rng(self.seed)
        heads = self.kv_heads * self.group
        kv_batch = 1 if self.kv_shared else self.batch
        rows, keys, D, DV = self.rows, self.keys, self.width, self.value_width
        q = numbers.standard_normal((self.batch, heads, rows, D))
        k, v = (numbers.standard_normal((kv_batch, self.kv_heads, keys, d)) for d in (D, DV))
        if self.odd:
            v[0, 0, keys // 2, 3] = k[0, 0, keys // 3, 5] = np.nan
        at = (
            np.arange(self.batch).reshape(-1, 1, 1, 1), np.arange(heads).reshape(1, -1, 1, 1),
            np.arange(rows).reshape(-1, 1), np.arange(keys),
        )  # fmt: skip
        shifts = (3, 5, 7, 11)
        seen = tuple(x + shift for x, shift in zip(at, shifts, strict=True))
        modulus = self.pick.choice((2, 3, 97))

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, *_: Any) -> Any:
            return (q_idx * 3 + kv_idx * 5 + h) % modulus != 0

        # Kinds of blocks: unlisted, FULL, PARTIAL.
        q_blocks, kv_blocks = -(-rows // self.q_block), -(-keys // self.kv_block)
        kinds = numbers.integers(0, 3, (1, self.pick.choice((1, heads)), q_blocks, kv_blocks))
        if not self.has_mask_mod:
            kinds = np.minimum(kinds, 1)
        if self.blank:
            kinds *= 0
        offsets, runs = runs_of(kinds, self.pick)
        live = np.ones((self.batch, heads, rows, keys), bool)
        if self.has_mask:
            of_pair = kinds[:, :, at[2].ravel() // self.q_block][..., at[3] // self.kv_block]
            live = np.broadcast_to(of_pair != 0, live.shape).copy()
            if self.has_mask_mod:
                live &= (of_pair == 1) | mask_mod(*seen)

        # The dense formula.
        ke, ve = (
            np.repeat(np.broadcast_to(x, (self.batch, *x.shape[1:])), self.group, 1)
            for x in (k, v)
        )
        score = q @ np.swapaxes(ke, -1, -2) * self.scale
        if self.has_score_mod:
            score = softcap(score, *seen)
        score = np.where(live, score, -np.inf)
        top = score.max(-1, keepdims=True)
        dead = np.isneginf(top)
        exponentials = np.where(live, np.exp(score - np.where(dead, 0.0, top)), 0.0)
        sums = exponentials.sum(-1, keepdims=True)
        sinks = numbers.standard_normal(heads) if self.seed % 2 else None
        whole = sums
        if sinks is not None:
            whole = sums + np.exp(sinks[:, None, None] - np.where(dead, 0.0, top))
        weights = exponentials / np.where(dead, 1.0, whole)
        lse = np.where(dead, -np.inf, top + np.log(np.where(dead, 1.0, sums)))[..., 0]

        # The kernel.
        even = keys % 128 == 0 and (not self.has_mask or self.kv_block % 128 == 0)
        out, rest = (np.full((*q.shape[:3], DV), np.nan) for _ in range(2))
        found_lse, found_top = (np.full(q.shape[:3], np.nan) for _ in range(2))
        found_tops = np.full((*q.shape[:3], 2), np.nan)
        strange: list[tuple[int, int, int]] = []
        # Draw any order of tiles.
        tile_count = -(-rows // 256)
        grids = (self.batch if self.pick.random() < 0.5 else 1, kinds.shape[1])
        order = numbers.random((*grids, tile_count)).argsort(-1)
        order_strides = tuple(
            step if size > 1 else 0
            for size, step in zip(grids, (grids[1] * tile_count, tile_count), strict=True)
        )

        unit = 1.0 if self.has_score_mod else self.scale

        def write_nonfinite_rows(*arguments: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """Record (b, h, first row), and return the rows' known statistics."""
            b, h, first_row = arguments[5:8]
            strange.append((b, h, first_row))
            part = (b, h, np.minimum(first_row + np.arange(128), rows - 1), 0)
            return top[part] / unit, sums[part], whole[part]

        run_kernel(
            blackwell_forward,
            "forward_kernel",
            self.programs,
            {
                "q_desc": Box(q, (1, 1, 128, D)), "k_desc": Box(k, (1, 1, 128, D)),
                "v_desc": Box(v, (1, 1, 128, DV)), "o_desc": Box(out, (1, 1, 128, self.piece)),
                "r_desc": Box(rest, (1, 1, 128, self.piece)),
                **dict.fromkeys(("query", "key", "value", "out", "rest")),
                **dict.fromkeys(
                    ("q_strides", "k_strides", "v_strides", "o_strides", "r_strides")
                ),
                "tops": Pointer(found_tops),
                "lse": Pointer(found_lse), "max_scores": Pointer(found_top),
                "counter": Pointer(np.zeros(1, int)),
                "offsets": Pointer(offsets), "ends": Pointer(offsets, 1), "runs": Pointer(runs),
                "mask_strides": (0, offsets.shape[2] if offsets.shape[1] > 1 else 0),
                "tile_order": Pointer(order) if self.has_mask else None,
                "order_strides": order_strides if self.has_mask else None,
                "ordered": self.pick.choice((0, 1)) if self.has_mask else None,
                "tables": (), "ints": (), "floats": (), "shifts": shifts, "scale": self.scale,
                "sinks": None if sinks is None else Pointer(sinks),
                "batch_heads": self.batch * heads, "heads": heads, "q_length": rows,
                "kv_length": keys, "tiles": tile_count, "head_group": self.head_group,
                "SCORE_MOD": softcap if self.has_score_mod else None,
                "MASK_MOD": mask_mod if self.has_mask_mod else None,
                "MASK_SCORES": mask_scores_of(mask_mod) if self.has_mask_mod else None,
                "HAS_MASK": self.has_mask,
                "Q_BLOCK": self.q_block, "KV_BLOCK": self.kv_block, "GROUP": self.group,
                "KV_SHARED": self.kv_shared, "DIM": D, "VALUE_DIM": DV, "D": D, "DV": DV,
                "WANT_LSE": True, "WANT_MAX": True, "WANT_REST": True, "EVEN": even,
                "STAGES": self.stages, "BLOCK_N": 128, "PIECE": self.piece,
                "GROUP_REGISTERS": 0, "OTHER_REGISTERS": 0,
            },
            self.seed,
            changed,
            (
                tiles, forward, smem_mailbox, apply_mods,
                write_softmax_stats, split_tiles,
            ),
            {"write_nonfinite_rows": write_nonfinite_rows},
        )  # fmt: skip
        wanted = weights @ np.nan_to_num(ve)
        if self.odd:
            # Mark the tiles that saw the key, or multiplied it by 0, and so wrote nothing.
            for b, h, row in strange:
                part = (b, h, slice(row, row + 128))
                assert np.isnan(out[part]).all()
                out[part] = wanted[part]
                rest[part] = 0.0
            met = live & (np.isnan(ve).any(-1) | np.isnan(ke).any(-1))[:, :, None, :]
            hit = {(int(b), int(h), int(i) // 128 * 128) for b, h, i in np.argwhere(met.any(-1))}
            assert hit <= set(strange)
        else:
            assert not strange
        yield "out", out, wanted
        yield "rest", rest, np.zeros_like(rest)
        yield "lse", found_lse, lse
        yield "max_scores", found_top, top[..., 0]
        size = np.where(dead, 0.0, np.log2(np.where(dead, 1.0, whole)))
        yield "tops", found_tops[~dead[..., 0], 0], top[~dead] / unit
        yield "sums", found_tops[~dead[..., 0], 1], size[~dead]


def check(case: Case, changed: tuple[str, str] = ("", "")) -> None:
    for name, found, wanted in case.run(changed):
        np.testing.assert_allclose(found, wanted, atol=1e-9, rtol=1e-9, err_msg=name)


@pytest.mark.parametrize("seed", range(24 if SOAK else 4))
def test_random_calls_in_random_orders_agree_with_the_dense_formula(seed: int) -> None:
    check(Case(seed))


PIECES = [
    ("mbarrier.wait(orders.empty.index(slot), ((order // ORDERS) & 1) ^ 1)", "pass"),
    ("mbarrier.wait(orders.full.index(order % ORDERS), (order // ORDERS) & 1)", "pass"),
    ("mbarrier.wait(ring.k_empty.index(slot), phase)", "pass"),
    ("mbarrier.wait(ring.v_empty.index(slot), phase)", "pass"),
    ("mbarrier.wait(queries.empty, (tile.filled & 1) ^ 1)", "pass"),
    ("mbarrier.wait(ring.k_full.index(slot), (step // ring.STAGES) & 1)", "pass"),
    ("mbarrier.wait(ring.v_full.index(before), ((step - 1) // ring.STAGES) & 1)", "pass"),
    ("mbarrier.wait(queries.full.index(0), filled & 1)", "pass"),
    ("mbarrier.wait(queries.full.index(1), filled & 1)", "pass"),
    ("mbarrier.wait(weighed, weights & 1)", "pass"),
    ("mbarrier.wait(memory.done, dones & 1)", "pass"),
    ("mbarrier.wait(memory.summed, filled & 1)", "pass"),
    ("tcgen05_commit(queries.empty)", "pass"),
    ("tcgen05_commit(ring.v_empty.index(before))", "pass"),
    ("tcgen05_commit(ring.k_empty.index(slot))", "pass"),
    ("mbarrier.arrive(memory.weighed, count=1)", "pass"),
    ("mbarrier.init(order_empty.index(i), count=3)", "mbarrier.init(order_empty.index(i), 2)"),
    # A single barrier for scores and the tile's accumulator would get two phases ahead of its
    # group.
    ("summed.index(", "done.index("),
    ("scale_sums(sums, alpha, call.DV, PIECE, LAYOUT)", "pass"),
    ("tma.store_wait(0)", "pass"),
    ("return weights, used | due", "return weights, used"),
    ("gl.where(inside_0, full_0, 1) * gl.where(inside_1, full_1, 1)", "full_0"),
    ("if first_row < q_length:", "if True:"),
]


@pytest.mark.parametrize(("piece", "instead"), PIECES[:: 1 if SOAK else 12])
def test_without_a_piece_of_its_protocol_the_kernel_fails(piece: str, instead: str) -> None:
    for seed in range(12):
        fixed = {
            "rows": (500, 300)[seed % 2], "keys": 512, "q_block": 128, "kv_block": 128,
            "has_mask": True, "odd": False, "scale": 2.0, "programs": 1 + seed % 2,
            "batch": 2, "kv_heads": 2, "group": 2, "blank": seed % 3 == 2,
        }  # fmt: skip
        try:
            check(Case(seed, **fixed), (piece, instead))
        except (AssertionError, Stuck):
            return
    pytest.fail("every seed gave the right outputs")
