"""Native functions on one tile, with guarded memory around everything that they may write, and
torch's results for the same pairs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anyflex.plugin import CapturedFacts, Derivative, ModGraph, Node, evaluate
from anyflex_cpu import library, structs
from anyflex_cpu.bytecode import mask_program, score_program
from anyflex_cpu.bytecode_steps import numbers
from anyflex_cpu.index_ranges import LIMITS, Limits
from anyflex_cpu.jit import Mods, NativeFunction, compile_mods

__all__ = ["NativeTile", "NoArtifacts", "compiled", "expected", "expected_gradients"]

GUARD = 256
PATTERN = 0x5A


class NoArtifacts:
    """Artifacts in memory, for one test."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        return self.kept.get(name)

    def put(self, name: str, data: bytes) -> None:
        self.kept[name] = data


@dataclass(frozen=True)
class NativeMods:
    """A spec's mods, each None where the spec has none."""

    mask: NativeFunction | None = None
    score: NativeFunction | None = None
    score_backward: NativeFunction | None = None


def compiled(
    *,
    mask: ModGraph | None = None,
    score: ModGraph | None = None,
    derivative: Derivative | None = None,
    captured: Sequence[Tensor] = (),
    artifacts: NoArtifacts | None = None,
    limits: Limits = LIMITS,
) -> NativeMods:
    """The graphs' native functions, with bytecode to find reads outside in."""
    functions = compile_mods(
        Mods(mask, score, derivative),
        captured=[CapturedFacts(t.dtype, t.dim(), False) for t in captured],
        artifacts=artifacts or NoArtifacts(),
        address=library.load().address,
        limits=limits,
    )
    for kind, graph, write in (("mask", mask, mask_program), ("score", score, score_program)):
        if graph is not None:
            code = write(graph, numbers(library.load().operations()), limits)
            words = (ctypes.c_int64 * -(-len(code) // 8)).from_buffer_copy(code)
            _bytecode[functions[kind].address] = words
    return NativeMods(**functions)


_bytecode: dict[int, ctypes.Array[ctypes.c_int64]] = {}
"""Address of a native function -> its mod's bytecode."""


class _Guarded:
    """Bytes at an address that is a multiple of 64, with a pattern before and after."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = torch.full((size + 2 * GUARD + 64,), PATTERN, dtype=torch.uint8)
        self.start = GUARD + -(self.memory.data_ptr() + GUARD) % 64

    def view(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        inside = self.memory[self.start : self.start + self.size]
        count = rows * columns * dtype.itemsize
        return inside[:count].view(dtype).view(rows, columns)

    def check(self) -> None:
        before, after = self.memory[: self.start], self.memory[self.start + self.size :]
        assert (before == PATTERN).all() and (after == PATTERN).all(), "written outside"


@dataclass
class NativeTile:
    """A rectangle of pairs.

    Attributes:
        live: bool [rows, columns], or None where all pairs are live.
        places: b, h, q, kv of the first pair; `offset` is added.
        score, grad: [rows, ld]; NaN past the last column.
        sums: double accumulators of a derivative's scatters, zeroed; None where unwanted.
        notes: (mod, captured, dim, index) of the reads outside that the last run reported.
    """

    rows: int
    columns: int
    places: tuple[int, int, int, int] = (0, 0, 0, 0)
    captured: Sequence[Tensor] = ()
    ints: Sequence[int] = ()
    floats: Sequence[float] = ()
    live: Tensor | None = None
    offset: tuple[int, int, int, int] = (0, 0, 0, 0)
    score: Tensor = field(init=False)
    grad: Tensor = field(init=False)
    sums: list[Tensor | None] = field(init=False)
    notes: list[tuple[int, int, int, int]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.width = (self.columns + 15) // 16 * 16
        size = self.rows * self.width
        self._memory = [_Guarded(4 * size), _Guarded(4 * size), _Guarded(size // 8)]
        self.score = self._memory[0].view(self.rows, self.width, torch.float32).fill_(torch.nan)
        self.grad = self._memory[1].view(self.rows, self.width, torch.float32).fill_(torch.nan)
        self.words = self._memory[2].view(self.rows, self.width // 16, torch.int16)
        if self.live is not None:
            bits = torch.zeros(self.rows, self.width, dtype=torch.int32)
            bits[:, : self.columns] = self.live
            words = bits.view(self.rows, -1, 16) << torch.arange(16, dtype=torch.int32)
            self.words.copy_(words.sum(-1))
        self.sums = [None] * len(self.captured)

    def want_gradients(self, positions: Sequence[int]) -> None:
        for position in positions:
            shape = self.captured[position].shape
            self.sums[position] = torch.zeros(shape, dtype=torch.float64)

    def run(self, function: NativeFunction | None, *, mask: bool = False) -> None:
        """Run a program; scores, gradients or words change in place."""
        assert function is not None
        captured = (structs.Captured * max(1, len(self.captured)))()
        held = []
        for i, tensor in enumerate(self.captured):
            size = (ctypes.c_int64 * max(1, tensor.dim()))(*tensor.shape)
            stride = (ctypes.c_int64 * max(1, tensor.dim()))(*tensor.stride())
            held += [size, stride]
            captured[i] = structs.Captured(
                tensor.data_ptr(),
                ctypes.addressof(size),
                ctypes.addressof(stride),
                structs.TYPE_CODES[tensor.dtype],
                tensor.dim(),
            )
        ints = (ctypes.c_int64 * max(1, len(self.ints)))(*self.ints)
        floats = (ctypes.c_double * max(1, len(self.floats)))(*self.floats)
        inputs = structs.ModInputs(
            ctypes.addressof(captured),
            ctypes.addressof(ints),
            ctypes.addressof(floats),
            (ctypes.c_int64 * 4)(*self.offset),
        )
        sums = (ctypes.c_void_p * max(1, len(self.sums)))(
            *(None if total is None else total.data_ptr() for total in self.sums)
        )
        scratch = _Guarded(function.scratch_bytes)
        error = structs.Error()
        tile = structs.Tile(
            self.score.data_ptr(),
            self.grad.data_ptr(),
            self.words.data_ptr() if mask or self.live is not None else None,
            self.width,
            self.width // 16,
            self.rows,
            self.columns,
            *self.places,
            ctypes.addressof(inputs),
            ctypes.addressof(sums),
            scratch.memory.data_ptr() + scratch.start,
            ctypes.addressof(error),
        )
        words = _bytecode.get(function.address)
        code = None if words is None else ctypes.addressof(words)
        program = structs.Program(function.address, code, 0, function.scratch_bytes)
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(function.address)
        call(ctypes.addressof(program), ctypes.addressof(tile))
        found = (error.mod, error.captured, error.dim, error.index)
        self.notes = [found] if error.code else []
        for memory in (*self._memory, scratch):
            memory.check()

    def bits(self) -> Tensor:
        """The live bits, bool [rows, columns]; those past the last column must be 0."""
        bits = self.words[:, :, None].to(torch.int32) >> torch.arange(16, dtype=torch.int32) & 1
        whole = bits.bool().view(self.rows, self.width)
        assert not whole[:, self.columns :].any()
        return whole[:, : self.columns]

    def inputs(self) -> dict[str, Tensor]:
        """The mod's inputs, to be broadcast to [rows, columns]."""
        b, h, q, kv = (a + o for a, o in zip(self.places, self.offset, strict=True))
        return {
            "score": self.score[:, : self.columns].clone(),
            "grad": self.grad[:, : self.columns].clone(),
            "b": torch.tensor(b),
            "h": torch.tensor(h),
            "q_idx": torch.arange(q, q + self.rows)[:, None],
            "kv_idx": torch.arange(kv, kv + self.columns)[None],
        }


def expected(tile: NativeTile, nodes: Sequence[Node], wanted: Sequence[int]) -> list[Tensor]:
    """Values of the nodes by torch, [rows, columns] each."""
    values = evaluate(
        nodes,
        wanted,
        inputs=tile.inputs(),
        captured=list(tile.captured),
        ints=tile.ints,
        floats=tile.floats,
    )
    return [value.expand(tile.rows, tile.columns).clone() for value in values]


def expected_gradients(
    tile: NativeTile, derivative: Derivative, live: Tensor
) -> tuple[Tensor, dict[int, Tensor], dict[int, Tensor]]:
    """The gradient of the scores; the sums that the scatters add; and the sums of the terms'
    sizes."""
    wanted = [] if derivative.score is None else [derivative.score]
    for scatter in derivative.scatters:
        wanted += [scatter.value, *scatter.indices]
    values = iter(expected(tile, derivative.nodes, wanted))
    score = torch.zeros(tile.rows, tile.columns) if derivative.score is None else next(values)
    sums: dict[int, Tensor] = {}
    sizes: dict[int, Tensor] = {}
    for scatter in derivative.scatters:
        table = tile.captured[scatter.captured]
        value = next(values)[live].double()
        indices = [next(values)[live].long() for _ in scatter.indices]
        for store, part in ((sums, value), (sizes, value.abs())):
            total = store.setdefault(
                scatter.captured, torch.zeros(table.shape, dtype=torch.float64)
            )
            if not indices:
                total += part.sum()
            elif table.numel():
                places = tuple(
                    torch.where(index < 0, index + size, index).clamp(0, size - 1)
                    for index, size in zip(indices, table.shape, strict=True)
                )
                total.index_put_(places, part, accumulate=True)
    return score.float().masked_fill(~live, 0), sums, sizes
