"""Every operation in every type, at the values where definitions differ, against torch."""

from __future__ import annotations

import math

import pytest
import torch
from tile_runs import OK, Tile, expected, operations
from torch import Tensor

from anyflex.plugin import (
    DTYPES,
    OPERATIONS,
    Derivative,
    ModGraph,
    Node,
    Scatter,
    operand_classes,
    type_class,
)
from anyflex_cpu.bytecode import BYTECODE, mask_program, score_backward_program

__all__: list[str] = []

NAMES = {dtype: name for name, dtype in DTYPES.items()}
I64 = torch.int64
ELEMENTWISE = [name for name in OPERATIONS if OPERATIONS[name] in (1, 2) and name != "cast"]
# Tolerance in units in the last place: the interpreter's error, for float64 also torch's. A value
# that is rounded to a narrow type may lie on the other side of a tie.
ULPS = {torch.float32: 2.0, torch.float64: 2.0, torch.float16: 0.51, torch.bfloat16: 0.51}


def values_of(dtype: torch.dtype) -> Tensor:
    """Values at which some operation has a special case."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        ends = [limits.min, limits.min + 1, limits.max, limits.max - 1, limits.max // 2]
        small = [0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 100]
        if limits.min < 0:
            small += [-1, -2, -3, -7, -8, -16, -33]
        return torch.tensor([*ends, *small], dtype=dtype)
    limits = torch.finfo(dtype)
    edges = [0.0, limits.tiny, limits.smallest_normal / 2, limits.max, math.inf, limits.eps]
    plain = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 0.3, 0.7, 10.0, 20.5, 88.0, 1e3, 1 / 3, 1 + 1e-3]
    both = torch.tensor([*edges, *plain], dtype=torch.float64)
    return torch.cat([both, -both, torch.tensor([math.nan])]).to(dtype)


def operation_nodes(name: str, dtype: torch.dtype, way: str) -> list[Node]:
    """q_idx, kv_idx, the operands, then the operation. `way` says on what each operand depends:
    q or k for an index alone, p for both."""
    nodes = [Node("input", I64, (), "q_idx"), Node("input", I64, (), "kv_idx")]
    for table, letter in enumerate(way):
        indices = {"q": (0,), "k": (1,), "p": (0, 1)}[letter]
        nodes.append(Node("load", dtype, indices, table))
    result = torch.bool if name in ("eq", "ne", "lt", "le", "gt", "ge") else dtype
    nodes.append(Node(name, result, tuple(range(2, 2 + len(way)))))
    return nodes


def operand(values: Tensor, letter: str, first: bool) -> Tensor:
    """A table that holds every value: the first operand's go down the rows."""
    if letter != "p":
        return values
    count = len(values)
    return (values[:, None] if first else values[None]).expand(count, count).contiguous()


def check_exactly(nodes: list[Node], tile: Tile) -> None:
    """Check that the last node, a bool or an integer, equals torch's in all bits."""
    (wanted,) = expected(tile, nodes, (len(nodes) - 1,))
    last = nodes[-1]
    answer = Node("load", last.dtype, (0, 1), len(tile.captured))
    graph = ModGraph(
        (*nodes, answer, Node("eq", torch.bool, (len(nodes) - 1, len(nodes)))), len(nodes) + 1
    )
    tile = Tile(tile.rows, tile.columns, captured=(*tile.captured, wanted))
    code = mask_program(graph, operations())
    tile.run(code, mask=True)
    assert tile.error.code == OK
    equal = tile.bits()
    where = (~equal).nonzero()[:4].tolist()
    assert equal.all(), (
        f"{last} {[t.dtype for t in tile.captured]} at {where}: {wanted[~equal][:4]}"
    )


def doubles(nodes: list[Node], tile: Tile) -> Tensor:
    """The last node, a float of any type, computed by the program: float64 [rows, columns]."""
    last = nodes[-1]
    value = len(nodes) - 1
    if last.dtype in (torch.float16, torch.bfloat16):
        nodes = [*nodes, Node("cast", torch.float32, (value,))]
        value += 1
    sums = torch.zeros(tile.rows, tile.columns, dtype=torch.float64)
    tile = Tile(tile.rows, tile.columns, captured=(*tile.captured, sums))
    table = len(tile.captured) - 1
    derivative = Derivative(tuple(nodes), None, (Scatter(table, (0, 1), value),))
    code = score_backward_program(derivative, operations())
    found = torch.zeros_like(sums)
    tile.run(code, grads=[None] * table + [found])
    assert tile.error.code == OK
    assert (tile.grad[:, : tile.columns] == 0).all()
    return found


def check_closely(nodes: list[Node], tile: Tile, ulps: float) -> None:
    """Check that the last node, a float, is within `ulps` of torch's float64 result, rounded."""
    last = nodes[-1]
    found = doubles(nodes, tile)
    (wanted,) = expected(tile, nodes, (len(nodes) - 1,))
    (exact,) = expected(
        tile,
        [Node(n.operation, n.dtype, n.arguments, n.attribute) for n in nodes[:-1]]
        + [Node("cast", torch.float64, (a,)) for a in last.arguments]
        + [
            Node(
                last.operation,
                torch.float64,
                tuple(len(nodes) - 1 + i for i in range(len(last.arguments))),
            )
        ],
        (len(nodes) - 1 + len(last.arguments),),
    )
    limits = torch.finfo(last.dtype)
    size = exact.abs().clamp(min=limits.smallest_normal)
    unit = limits.eps * 2 ** size.log2().floor()
    wide = wanted.double()
    same = (found == wide) | (found.isnan() & wide.isnan())
    same |= (found - exact).abs() <= ulps * unit
    if last.operation in ("floordiv", "mod", "fmod"):
        # torch has no remainder where the quotient is too large for the type.
        first, second = (values.double() for values in expected(tile, nodes, last.arguments))
        same |= (first / second).abs().log2() > math.log2(limits.max)
    # The value was rounded to the other side of the type's largest value.
    same |= (
        found.isinf() & (exact.abs() >= limits.max * (1 - 4 * limits.eps)) & (found * exact > 0)
    )
    where = (~same).nonzero()[:4].tolist()
    message = f"{last} at {where}: {found[~same][:4]} not {wanted[~same][:4]}, {exact[~same][:4]}"
    assert same.all(), message


def ways(arity: int) -> list[str]:
    return ["qk", "kq", "pp", "qq", "kk", "pq", "kp"] if arity == 2 else ["p", "q", "k"]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_operation_means_what_torch_says(name: str, level: str) -> None:
    for dtype in DTYPES.values():
        if type_class(dtype) not in operand_classes(name):
            continue
        values = values_of(dtype)
        for way in ways(OPERATIONS[name] or 0):
            nodes = operation_nodes(name, dtype, way)
            tables = [operand(values, letter, i == 0) for i, letter in enumerate(way)]
            tile = Tile(len(values), len(values), captured=tables)
            if nodes[-1].dtype.is_floating_point:
                check_closely(nodes, tile, ULPS[dtype])
            elif name in ("floordiv", "mod", "fmod"):
                # Division by 0 gives an arbitrary value.
                for table in range(len(tables)):
                    if table == 1:
                        tables[1] = torch.where(tables[1] == 0, 1, tables[1])
                check_exactly(nodes, tile)
            else:
                check_exactly(nodes, tile)


def test_the_table_lacks_no_operation() -> None:
    assert BYTECODE.problems() == []
