"""Steps of bytecode (native/src/bytecode.h): values, their registers, a program's bytes."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from anyflex_cpu.graph_stages import PAIR, ROW, TILE

__all__ = [
    "GRAD_ROW",
    "LIVE_ROW",
    "MASK",
    "SCORE",
    "SCORE_BACKWARD",
    "SCORE_ROW",
    "Index",
    "Steps",
    "Value",
    "numbers",
]

_MAGIC = 0x43464131
MASK, SCORE, SCORE_BACKWARD = 0, 1, 2
"""Kinds of programs."""

_STEP = struct.Struct("=6HI")
_OPERAND = struct.Struct("=HBB")
_STEP_OF_LANES = struct.Struct("=i")
_CONSTANTS = {"p": "=?7x", "i": "=i4x", "l": "=q", "f": "=f4x", "d": "=d"}


@functools.lru_cache(maxsize=1)
def numbers(operations: str) -> dict[str, int]:
    """Return name -> number of the library's list of operations (``af_operations``)."""
    return {line.split(" ")[0]: i for i, line in enumerate(operations.splitlines())}


@dataclass(slots=True, eq=False)
class Value:
    """Result of a step, in lanes or in the tile's memory. Compared by identity.

    Attributes:
        kind: ``p`` bits, ``i`` int32, ``l`` int64, ``f`` float, ``d`` double.
        stage: where it is computed, one of `anyflex_cpu.graph_stages`.
        slot: its register, once it has one.
    """

    kind: str
    stage: int
    slot: int = -1
    born: _Step | None = None
    last_use: _Step | None = None
    lives_on: bool = False

    def used(self, step: _Step) -> None:
        """Note that a step reads this."""
        self.last_use = step
        if self.stage != step.stage:
            self.lives_on = True

    @property
    def is_one(self) -> bool:
        """Whether it is one value for all lanes of a row, seen from the innermost loop."""
        return self.stage in (TILE, ROW)

    @property
    def is_special(self) -> bool:
        return self.slot >= SCORE_ROW


SCORE_ROW, GRAD_ROW, LIVE_ROW = 0xFFFD, 0xFFFE, 0xFFFF
"""Slots that stand for the row of the tile's scores, gradients, live bits."""


class Index(NamedTuple):
    """An index of a load or scatter; `step` is its growth per lane, if that is known."""

    value: Value
    step: int | None


@dataclass(slots=True, eq=False)
class _Step:
    name: str
    result: Value | None
    reads: tuple[Value, ...]
    stage: int
    immediate: int
    indices: tuple[Index, ...]


class Steps:
    """The steps of a program, by stage, in order."""

    def __init__(self) -> None:
        self._stages: tuple[list[_Step], ...] = ([], [], [], [])
        self._known: dict[tuple[object, ...], Value] = {}
        self._constants: dict[bytes, int] = {}

    def add(
        self,
        name: str,
        kind: str,
        stage: int,
        reads: tuple[Value, ...] = (),
        immediate: int = 0,
        indices: tuple[Index, ...] = (),
    ) -> Value:
        """Append a step, or find the equal one; return its value."""
        key = (name, stage, immediate, reads, indices)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Value(kind, stage)
            known.born = self._append(_Step(name, known, reads, stage, immediate, indices))
        return known

    def constant(self, kind: str, value: float) -> Value:
        """A value that is the same in all lanes of a tile."""
        packed = struct.pack(_CONSTANTS[kind], value)
        place = self._constants.setdefault(packed, len(self._constants))
        return self.add(f"const_{kind}", kind, TILE, (), place)

    def scatter(self, value: Value, captured: int, indices: tuple[Index, ...]) -> None:
        """Add a value per pair to the gradient of a captured tensor."""
        name = f"scatter_{value.kind}" + ("S" if value.is_one else "")
        self._append(_Step(name, None, (value,), PAIR, captured, indices))

    def write(self, value: Value, slot: int) -> None:
        """Store a value in the tile's memory."""
        if value.slot == slot:
            return
        pairs = self._stages[PAIR]
        born = value.born
        if value.stage == PAIR and not value.is_special and born is not None:
            later = pairs[pairs.index(born) + 1 :]
            if not any(read.slot == slot for step in later for read in step.reads):
                # Renames the result's register, which saves a copy: readers of the value read that
                # memory.
                value.slot = slot
                return
        name = "spread_" if value.is_one else "copy_"
        target = Value(value.kind, PAIR, slot)
        target.born = self._append(_Step(name + value.kind, target, (value,), PAIR, 0, ()))

    def _append(self, step: _Step) -> _Step:
        self._stages[step.stage].append(step)
        for value in (*step.reads, *(index.value for index in step.indices)):
            value.used(step)
        return step

    def encoded(self, kind: int, operations: dict[str, int]) -> bytes:
        """Return the program, with registers allocated."""
        slots = self._give_registers()
        if slots > SCORE_ROW:
            raise RuntimeError(f"a mod takes {slots} registers, and there are {SCORE_ROW}")
        steps: list[bytes] = []
        operands: list[bytes] = []
        ends: list[int] = []
        for stage in self._stages:
            for step in stage:
                a, b, c = (*[read.slot for read in step.reads], 0, 0, 0)[:3]
                if step.indices or step.name.startswith(("load", "scatter")):
                    b = len(step.indices)
                result = 0 if step.result is None else step.result.slot
                where = len(operands) if step.indices else 0
                number = operations[step.name]
                steps.append(_STEP.pack(number, result, a, b, c, step.immediate, where))
                for index in step.indices:
                    operands += _operand(index, step.stage)
            ends.append(len(steps))
        counts = (slots, len(steps), *ends, len(operands), len(self._constants))
        header = struct.pack("=10I", _MAGIC, kind, *counts)
        padding = bytes(len(operands) % 2 * 4)
        return b"".join((header, *steps, *operands, padding, *self._constants))

    def _give_registers(self) -> int:
        """Allocate registers: no two values that live at once share one. Return the number of
        slots."""
        free: dict[int, list[int]] = {1: [], 2: []}
        slots = 0
        for stage in self._stages:
            for step in stage:
                ended = [
                    value
                    for value in _distinct(step)
                    if value.last_use is step and not (value.lives_on or value.is_special)
                ]
                result = step.result
                if result is not None and not result.is_special:
                    width = _width(result)
                    # Lanes of one size may be overwritten while they are read.
                    for value in ended:
                        if _lane(value) == _lane(result):
                            free[width].append(value.slot)
                    ended = [value for value in ended if _lane(value) != _lane(result)]
                    if free[width]:
                        result.slot = free[width].pop()
                    else:
                        result.slot = slots
                        slots += width
                    if result.last_use is None:
                        ended.append(result)
                for value in ended:
                    free[_width(value)].append(value.slot)
        return slots


def _distinct(step: _Step) -> Sequence[Value]:
    if not step.indices and len(step.reads) < 2:
        return step.reads
    return list(dict.fromkeys((*step.reads, *[index.value for index in step.indices])))


def _width(value: Value) -> int:
    return 2 if value.kind in "ld" else 1


def _lane(value: Value) -> int:
    return 1 if value.kind == "p" else 4 * _width(value)


def _operand(index: Index, stage: int) -> list[bytes]:
    value = index.value
    wide = value.kind == "l"
    if value.is_one if stage == PAIR else value.stage == TILE:
        return [_OPERAND.pack(value.slot, wide, 1)]
    if index.step:
        return [_OPERAND.pack(value.slot, wide, 2), _STEP_OF_LANES.pack(index.step)]
    return [_OPERAND.pack(value.slot, wide, 0)]
