"""Hopper's decoding of packed sequences, its source run in Python: what its pieces are for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from gluon_in_python import Stuck
from packed_decode_in_python import EDGES, FLOAT8, Case, InPython, by_slot, check
from scripts_beside import SOAK

from anyflex.plugin import PluginError, isolated, register
from anyflex.testing import posing

CASES = [
    Case("edges", EDGES, spare=5, score=by_slot, rows_first=True),
    Case("pages", ((2, 300), (1, 31), (1, 650)), page=48, dims=(128, 128)),
    Case("steps", ((1, 64), (2, 200), (1, 900)), page=128, cores=9, score=by_slot),
    Case("packed", EDGES, page=0, spare=2, score=by_slot),
    Case("beside long ones", ((1, 90), (65, 70), (0, 3)), page=0, spare=3),
    Case("odd", odd=True, rows_first=True),
    Case("odd, packed", odd=True, page=0),
    Case("int8", ((2, 300), (1, 31), (1, 140)), page=48, stored=torch.int8, heads=(4, 2)),
    Case("float8, odd, packed", odd=True, page=0, stored=FLOAT8, rows_first=True),
]
PIECES = [
    ("tl.minimum(key, places.length - 1) // PAGE", "key // PAGE"),
    ("(first + p * BOX) % plan.PAGE", "(first + p * BOX)"),
    ("boxes.index((slot * PANELS + c) * BOXES + p)", "boxes.index((slot * PANELS + c) * BOXES)"),
    ("c * COLUMNS]", "0]"),
    ("row = first % plan.PAGE", "row = first"),
    ("tl.maximum((places.length + BLOCK_N - 1) // BLOCK_N, 1)",
     "(places.length + BLOCK_N - 1) // BLOCK_N"),
    ("gl.where(kind > 1, part, 0)", "part"),
    ("row += unit.first_row", "pass"),
    ("(unit.first_row + row).to(gl.int64)", "row.to(gl.int64)"),
    ("unit.mod_b + mods.shifts[0]", "unit.b + mods.shifts[0]"),
    ("gl.expand_dims(row, 1) + unit.q_shift + mods.shifts[2]",
     "gl.expand_dims(row, 1) + mods.shifts[2]"),
    ("keys.first_row + first, plan)", "first, plan)"),
    ("base += gl.cast(unit.keys.first_row, gl.int64) * strides[2]", "pass"),
    ("base += gl.cast(page, gl.int64) * strides[0]", "pass"),
    ("gl.cast(first % plan.PAGE - first, gl.int64) * strides[2]", "0"),
    ("if call.ALONE:", "if False:"),
    ("place += SHARE_FACTS", "place += 1"),
    ("tl.load(edges + s + 1) - earlier", "1 + 0 * earlier"),
    ("facts[5] * plan.sequences[12]", "0"),
    ("while end * plan.kv_heads <= at:", "if end * plan.kv_heads <= at:"),
    ("before = end\n", "pass\n"),
    ("before += tl.sum(steps, 0)", "pass"),
    ("tl.where(s < count, steps, 0)", "steps"),
    ("place * (outputs.GROUP * outputs.most_rows) + rows, there",
     "place * (outputs.GROUP * unit.rows) + rows, there"),
    ("gl.where(part.first_step == 0, 1, 0)", "0"),
    # These are needed by keys stored in 8 bits alone.
    ("permute((2, 3, 6, 5, 1, 4, 0))", "permute((1, 2, 3, 4, 5, 6, 0))"),
    ("permute((0, 3, 2, 1))", "permute((0, 1, 2, 3))"),
    ("expand_dims(power, 1) *", "expand_dims(power * 0.0 + 1.0, 1) *"),
    ("(alpha * (top * inverse), 1)", "(alpha, 1)"),
    ("acc = natural_columns(acc * top)", "acc = natural_columns(acc)"),
    ("row_sum * gl.expand_dims(alpha, 1) + weights", "row_sum + weights"),
    ("page_at(places, keys, PAGE).to(gl.int64) * scales[1]", "0"),
    ("row = places.first_row + keys", "row = keys"),
    ("count=1 + LOADERS", "count=1"),
    ("for_keys, mask=there)", "for_keys, mask=keys < first)"),
    ("gl.fma(scales, 0.0, scales)", "scales"),
    ("halves = keys_of_threads(", "halves = (lambda x, axis: x)("),
    ("permute((0, 2, 3, 4, 5, 1, 6))", "permute((0, 2, 3, 5, 6, 1, 4))"),
    ("scores *= gl.expand_dims(scales_of(tensors.k_scale, unit, keys, end, plan), 0)", "pass"),
    ("v = (v.to(gl.float32) * gl.expand_dims(of_values, 1)).to(DTYPE)", "pass"),
]  # fmt: skip
"""Pieces of the kernel that packed calls need."""


@pytest.mark.parametrize(("piece", "instead"), PIECES[:: 1 if SOAK else 10])
def test_without_a_piece_of_it_some_call_fails(piece: str, instead: str) -> None:
    with isolated(), posing("cuda"):
        register("cuda.python", InPython)
        for case in CASES:
            for seed in range(2):
                try:
                    check(case, (piece, instead), seed)
                except AssertionError:
                    return
                except PluginError as error:
                    assert isinstance(error.__cause__, Stuck), error
                    return
    pytest.fail("every call gave the reference's outputs")


STALE = [*CASES[:4], Case("float8", EDGES[:5], stored=FLOAT8)]


@pytest.mark.parametrize("case", STALE if SOAK else STALE[::4], ids=lambda case: case.name)
def test_stale_rows_behind_a_sequence_s_keys_are_computed_once(case: Case) -> None:
    once = ("is_nonfinite = gl.max((zeros != zeros).to(gl.int32), 0) > 0", "is_nonfinite = False")
    with isolated(), posing("cuda"):
        register("cuda.python", InPython)
        check(case, once)


def test_any_number_of_sequences_is_counted() -> None:
    few_lanes = ("_LANES = tl.constexpr(256)", "_LANES = tl.constexpr(4)")
    with isolated(), posing("cuda"):
        register("cuda.python", InPython)
        for case in CASES[:3]:
            check(case, few_lanes)


@pytest.mark.parametrize("case", CASES if SOAK else CASES[:1], ids=lambda case: case.name)
def test_calls_agree_in_any_order_of_events(case: Case) -> None:
    with isolated(), posing("cuda"):
        register("cuda.python", InPython)
        for seed in range(6 if SOAK else 2):
            check(case, seed=seed)
