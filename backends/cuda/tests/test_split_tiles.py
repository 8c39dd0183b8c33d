"""Tiles of three consumers whose rows lie in two rows of the mask's blocks: which steps there are,
and what is said of them to the consumers of each. The kernel's own functions, run in Python."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gluon_in_python import Device, Pointer

pytest.importorskip("triton", reason="triton is not installed")

from anyflex_cuda import hopper_forward

FULL, PARTIAL = 1, 2
STEP = 128
Run = tuple[int, int, int]


def functions(changed: tuple[str, str] = ("", "")) -> SimpleNamespace:
    """The functions of the source from `segment` to `await_tile`."""
    assert hopper_forward.__file__ is not None
    with open(hopper_forward.__file__) as file:
        text = file.read()
    begin = text.index("@gluon.jit\ndef segment(")
    body = text[begin : text.index("@gluon.jit\ndef await_tile(")]
    assert changed[0] in body
    names: dict[str, Any] = {
        "gl": Language(),
        "gluon": SimpleNamespace(jit=lambda f: f),
        "FULL": FULL,
    }
    exec("from __future__ import annotations\n" + body.replace(*changed), names)
    return SimpleNamespace(**names)


class Language:
    """`gl`, of scalars."""

    def __init__(self) -> None:
        self._of_tiles = Device(0, 1).language()
        self._loads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_tiles, name)

    def load(self, pointer: Pointer, mask: bool, other: int) -> Any:
        self._loads += 1
        assert self._loads < 2000, "it doesn't end"
        return np.int64(pointer.array[pointer.at] if mask else other)

    def to_tensor(self, x: int) -> Any:
        return np.int64(x)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return x if condition else y

    def minimum(self, x: Any, y: Any) -> Any:
        return min(x, y)

    def maximum(self, x: Any, y: Any) -> Any:
        return max(x, y)


def drawn_runs(chance: random.Random, blocks: int) -> list[Run]:
    runs, at = [], 0
    while at < blocks and chance.random() < 0.85:
        begin = at + chance.choice([0, 0, 1, 3])
        end = begin + chance.choice([1, 1, 2, 6])
        if end > blocks:
            break
        runs.append((begin, end, chance.choice([FULL, PARTIAL])))
        at = end
    return runs


def kinds_of(runs: list[Run], block: int, length: int) -> list[int]:
    """Of each key: 0 where no run has it."""
    found = [0] * length
    for begin, end, kind in runs:
        for key in range(begin * block, min(end * block, length)):
            found[key] = kind
    return found


def check(seed: int, changed: tuple[str, str] = ("", "")) -> None:
    chance = random.Random(seed)
    block = chance.choice([128, 256])
    length = chance.choice([128, 200, 1000, 1024])
    both = [drawn_runs(chance, -(-length // block)) for _ in range(2)]
    if chance.random() < 0.2:
        both[1] = both[0]
    made = functions(changed)
    runs = Pointer(np.array([*both[0], *both[1], (7, 9, 1)]))
    a, last_a, last_b = 0, len(both[0]), len(both[0]) + len(both[1])
    b = last_a
    arguments = (runs, a, last_a, b, last_b)
    masked, plain = made.count_split_steps(*arguments, length, block, STEP)
    kinds = [kinds_of(each, block, length) for each in both]
    seen: set[int] = set()
    counted = [0, 0]
    at = 0
    while a < last_a or b < last_b:
        begin, end, in_a, full_a, in_b, full_b, a, b = made.segment(
            runs, a, last_a, b, last_b, at, length, block
        )
        assert at <= begin < end <= length
        at = end
        for said_in, said_full, of_row in ((in_a, full_a, kinds[0]), (in_b, full_b, kinds[1])):
            kind = FULL if said_full else PARTIAL if said_in else 0
            assert of_row[begin:end] == [kind] * (end - begin)
        seen |= set(range(begin, end))
        whole = (end - begin) // STEP if full_a and full_b else 0
        counted[0] += -(-(end - begin) // STEP) - whole
        counted[1] += whole
    assert seen == {key for key in range(length) if kinds[0][key] or kinds[1][key]}
    assert [masked, plain] == counted


@pytest.mark.parametrize("part", range(4))
def test_two_rows_of_runs_are_cut_where_either_changes(part: int) -> None:
    for seed in range(part * 100, part * 100 + 100):
        check(seed)


@pytest.mark.parametrize(
    ("piece", "instead"),
    [
        ("a + gl.where(end_a <= end, 1, 0)", "a + 1"),
        ("begin = gl.maximum(at, ", "begin = gl.maximum(0, "),
        ("gl.where(in_b, end_b, begin_b)", "end_b"),
        ("in_a & full_a", "full_a"),
        ("gl.where(full_a & full_b,", "gl.where(full_a,"),
        (", length)", ", length + 128)"),
    ],
)
def test_this_test_finds_wrong_cuts(piece: str, instead: str) -> None:
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(100):
            check(seed, (piece, instead))
