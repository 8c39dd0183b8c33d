"""Random mod graphs around one operation, and all their values in a cell."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from anyflex.intervals.cells import Cells
from anyflex.intervals.evaluation import Domain
from anyflex.mod_graph.evaluate import evaluate
from anyflex.mod_graph.graph import ModGraph
from anyflex.mod_graph.graph_builder import GraphBuilder

__all__ = ["DOMAIN", "Expression", "cells_of", "values_in"]

INT, BOOL = torch.int64, torch.bool
DOMAIN = Domain(2, 3, (96, 80), (16, 16))


@dataclass(frozen=True)
class Expression:
    """A graph and its captured tensors."""

    graph: ModGraph
    captured: tuple[Tensor, ...]


class Operands:
    """Makes operands of an operation: indices, sums, reads, constants."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.builder = GraphBuilder()
        self.captured: list[Tensor] = []
        self.generator = torch.Generator().manual_seed(seed)

    def integer(self) -> int:
        add, kind = self.builder.add, self.random.randrange(8)
        q, kv = add("input", INT, (), "q_idx"), add("input", INT, (), "kv_idx")
        if kind == 0:
            return q
        if kind == 1:
            return kv
        if kind == 2:
            return add("sub", INT, (q, kv))
        if kind == 3:
            scaled = add("mul", INT, (q, self.constant(-3, 4)))
            return add("add", INT, (scaled, add("add", INT, (kv, self.constant(-40, 40)))))
        if kind == 4:
            return add("mod", INT, (add("sub", INT, (kv, q)), self.constant(1, 30)))
        if kind == 5:
            return self.constant(-20, 20)
        if kind == 6:
            return add("input", INT, (), self.random.choice("bh"))
        return self.read(INT, self.random.choice((q, kv)))

    def constant(self, low: int, high: int) -> int:
        return self.builder.add("const", INT, (), self.random.randint(low, high))

    def read(self, dtype: torch.dtype, index: int) -> int:
        if dtype is INT:
            table = torch.randint(-30, 31, (100,), generator=self.generator)
        elif dtype is BOOL:
            table = torch.rand(100, generator=self.generator) < 0.7
        else:
            table = torch.randn(100, generator=self.generator, dtype=dtype) * 3
        self.captured.append(table)
        return self.builder.add("load", dtype, (index,), len(self.captured) - 1)

    def floating(self, dtype: torch.dtype) -> int:
        add, kind = self.builder.add, self.random.randrange(4)
        if kind == 0:
            return add("cast", dtype, (self.integer(),))
        if kind == 1:
            value = float(torch.tensor(self.random.uniform(-3, 3), dtype=dtype))
            return add("const", dtype, (), value)
        if kind == 2:
            tenth = add("const", dtype, (), float(torch.tensor(0.1, dtype=dtype)))
            return add("mul", dtype, (add("cast", dtype, (self.integer(),)), tenth))
        name = self.random.choice(("q_idx", "kv_idx"))
        return self.read(dtype, add("input", INT, (), name))

    def boolean(self) -> int:
        add, kind = self.builder.add, self.random.randrange(4)
        if kind == 0:
            name = self.random.choice(("q_idx", "kv_idx"))
            return self.read(BOOL, add("input", INT, (), name))
        if kind == 1:
            left, right = self.floating(torch.float32), self.floating(torch.float32)
            return add(self.random.choice(("lt", "ge", "eq")), BOOL, (left, right))
        comparison = self.random.choice(("lt", "le", "gt", "ge", "eq", "ne"))
        return add(comparison, BOOL, (self.integer(), self.integer()))

    def wrapping(self, depth: int) -> int:
        """An int64 after conversions to types that may not hold it, and through floats."""
        add, draw = self.builder.add, self.random
        found = [self.integer()]
        for _ in range(depth):
            dtype = draw.choice((torch.int8, torch.uint8, torch.int16, torch.int32, INT))
            sides = [add("cast", dtype, (draw.choice(found),)) for _ in range(2)]
            large = (0x5DEECE66D,) if dtype is INT else ()
            constant = add("const", dtype, (), draw.choice((3, 5, 100, *large)))
            by = draw.choice((*sides[1:], constant))
            made = add(draw.choice(("add", "sub", "mul", "minimum")), dtype, (sides[0], by))
            if draw.random() < 0.3:
                made = add("where", dtype, (self.boolean(), made, sides[1]))
            if draw.random() < 0.3:
                made = add("cast", torch.float64, (made,))
            found.append(add("cast", INT, (made,)))
        return found[-1]

    def expression(
        self, operation: str, dtype: torch.dtype, arguments: tuple[int, ...]
    ) -> Expression:
        position = self.builder.add(operation, dtype, arguments)
        return Expression(ModGraph(tuple(self.builder.nodes), position), tuple(self.captured))


def cells_of(seed: int, count: int = 24) -> Cells:
    """Random cells of one or several whole blocks."""
    rng = random.Random(seed)
    lows: list[list[int]] = [[] for _ in range(6)]
    for _ in range(count):
        row, column = rng.randrange(6), rng.randrange(5)
        down, across = rng.randint(1, 6 - row), rng.randint(1, 5 - column)
        if rng.random() < 0.5:
            down = across = 1
        numbers = (
            rng.randrange(2), rng.randrange(3),
            row * 16, (row + down) * 16 - 1, column * 16, (column + across) * 16 - 1,
        )  # fmt: skip
        for place, number in zip(lows, numbers, strict=True):
            place.append(number)
    b, h, q_low, q_high, kv_low, kv_high = (torch.tensor(numbers) for numbers in lows)
    sixteen = torch.full((count,), 16)
    return Cells(count, b, h, q_low, q_high, kv_low, kv_high, sixteen, sixteen)


def values_in(expression: Expression, position: int, cells: Cells, cell: int) -> Tensor:
    """All values of a node in a cell, [rows of blocks, 16, columns of blocks, 16]."""
    ends = [int(torch.as_tensor(end)[cell]) for end in (
        cells.q_low, cells.q_high, cells.kv_low, cells.kv_high)]  # fmt: skip
    q = torch.arange(ends[0], ends[1] + 1)[:, None]
    kv = torch.arange(ends[2], ends[3] + 1)
    inputs = {"q_idx": q, "kv_idx": kv}
    for name, point in (("b", cells.b), ("h", cells.h)):
        inputs[name] = torch.as_tensor(point)[cell]
    (value,) = evaluate(
        expression.graph.nodes, (position,), inputs=inputs, captured=expression.captured,
        ints=(), floats=(),
    )  # fmt: skip
    value = value.expand(q.shape[0], kv.shape[0])
    return value.reshape(q.shape[0] // 16, 16, kv.shape[0] // 16, 16)
