"""Runs of a bytecode program on one tile, and torch's results for the same pairs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anyflex.plugin import Derivative, ModGraph, Node, evaluate
from anyflex_cpu import library, structs
from anyflex_cpu.bytecode_steps import numbers

__all__ = ["OK", "READ_OUTSIDE", "Tile", "expected", "operations", "scratch_bytes"]

OK, READ_OUTSIDE = 0, 1


def _exported(name: str, result: type, *arguments: type) -> ctypes._CFuncPtr:
    prototype = ctypes.CFUNCTYPE(result, *arguments)
    return prototype(library.load().address(name))


def operations() -> dict[str, int]:
    """The library's operations."""
    return numbers(_exported("af_operations", ctypes.c_char_p)().decode())


def scratch_bytes(code: bytes) -> int:
    held = _aligned(code)
    return _exported("af_program_scratch", ctypes.c_int64, ctypes.c_void_p)(held.data_ptr())


def _aligned(code: bytes) -> Tensor:
    """A copy of the bytes at an address that is a multiple of 64."""
    held = torch.empty(len(code) + 64, dtype=torch.uint8)
    start = -held.data_ptr() % 64
    held = held[start : start + len(code)]
    held.copy_(torch.frombuffer(bytearray(code) + b"\0", dtype=torch.uint8)[: len(code)])
    return held


def _zeros(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """[rows, columns] at an address that is a multiple of 64."""
    count = rows * columns
    held = torch.zeros(count + 64, dtype=dtype)
    start = -held.data_ptr() % 64 // held.element_size()
    return held[start : start + count].view(rows, columns)


@dataclass
class Tile:
    """A rectangle of pairs with its memory.

    Attributes:
        score, grad: [rows, ld]; NaN past the last column before a run.
        live: bool [rows, columns], or None where all pairs are live.
        places: b, h, q, kv of the first pair.
        error: what the last run reported.
    """

    rows: int
    columns: int
    places: tuple[int, int, int, int] = (0, 0, 0, 0)
    captured: Sequence[Tensor] = ()
    ints: Sequence[int] = ()
    floats: Sequence[float] = ()
    live: Tensor | None = None
    offset: tuple[int, int, int, int] = (0, 0, 0, 0)
    extra: int = 16
    score: Tensor = field(init=False)
    grad: Tensor = field(init=False)
    words: Tensor = field(init=False)
    error: structs.Error = field(init=False)

    def __post_init__(self) -> None:
        width = (self.columns + 15) // 16 * 16 + self.extra
        self.score = _zeros(self.rows, width, torch.float32).fill_(torch.nan)
        self.grad = _zeros(self.rows, width, torch.float32).fill_(torch.nan)
        self.words = _zeros(self.rows, max(32, width // 16), torch.int16)
        if self.live is not None:
            self.words[:, : width // 16] = _packed(self.live, width)

    def run(self, code: bytes, *, mask: bool = False, grads: Sequence[Tensor | None] = ()) -> None:
        """Run a program: scores, gradients or, for a mask, words change in place."""
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
        sums = (ctypes.c_void_p * max(1, len(grads)))(
            *(None if grad is None else grad.data_ptr() for grad in grads)
        )
        self.error = structs.Error()
        scratch = _zeros(1, scratch_bytes(code), torch.uint8).fill_(0xA5)
        program = _aligned(code)
        has_words = mask or self.live is not None
        tile = structs.Tile(
            None if mask else self.score.data_ptr(),
            self.grad.data_ptr() if grads or not mask else None,
            self.words.data_ptr() if has_words else None,
            self.score.stride(0),
            self.words.stride(0),
            self.rows,
            self.columns,
            *self.places,
            ctypes.addressof(inputs),
            ctypes.addressof(sums) if grads else None,
            scratch.data_ptr(),
            ctypes.addressof(self.error),
        )
        head = structs.Program(None, program.data_ptr(), len(code), scratch.numel())
        interpret = _exported("af_interpret", None, ctypes.c_void_p, ctypes.c_void_p)
        interpret(ctypes.addressof(head), ctypes.addressof(tile))

    def bits(self) -> Tensor:
        """The live bits: bool [rows, columns]; fails where one past the last column is set."""
        width = (self.columns + 15) // 16 * 16
        words = self.words[:, : width // 16, None].to(torch.int32)
        bits = (words >> torch.arange(16, dtype=torch.int32) & 1).bool().view(self.rows, width)
        assert not bits[:, self.columns :].any()
        return bits[:, : self.columns]

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


def _packed(live: Tensor, width: int) -> Tensor:
    bits = torch.zeros(live.shape[0], width, dtype=torch.int32)
    bits[:, : live.shape[1]] = live
    words = (bits.view(live.shape[0], -1, 16) << torch.arange(16, dtype=torch.int32)).sum(-1)
    return words.to(torch.int16)


def expected(tile: Tile, nodes: Sequence[Node], wanted: Sequence[int]) -> list[Tensor]:
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


def expected_output(tile: Tile, graph: ModGraph) -> Tensor:
    return expected(tile, graph.nodes, (graph.output,))[0]


def expected_gradients(
    tile: Tile, derivative: Derivative, live: Tensor
) -> tuple[Tensor, dict[int, Tensor]]:
    """The gradient of the scores, and the sums that the scatters add: captured -> float64."""
    wanted = [] if derivative.score is None else [derivative.score]
    for scatter in derivative.scatters:
        wanted += [scatter.value, *scatter.indices]
    tile.grad[:, : tile.columns][~live] = 0
    values = iter(expected(tile, derivative.nodes, wanted))
    score = torch.zeros(tile.rows, tile.columns) if derivative.score is None else next(values)
    sums: dict[int, Tensor] = {}
    for scatter in derivative.scatters:
        table = tile.captured[scatter.captured]
        total = sums.setdefault(scatter.captured, torch.zeros(table.shape, dtype=torch.float64))
        value = next(values)[live].double()
        indices = [next(values)[live].long() for _ in scatter.indices]
        if not indices:
            total += value.sum()
        if not indices or total.numel() == 0:
            continue
        places = tuple(
            torch.where(index < 0, index + size, index).clamp(0, size - 1)
            for index, size in zip(indices, table.shape, strict=True)
        )
        total.index_put_(places, value, accumulate=True)
    return score.float().masked_fill(~live, 0), sums
