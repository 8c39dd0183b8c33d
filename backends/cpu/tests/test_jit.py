"""Mods compiled in the process: every operation on every type, masks as bits, derivatives, reads
of captured tensors; torch's evaluation of the same graph is the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from native_tiles import NativeTile, NoArtifacts, compiled, expected, expected_gradients
from soak import SOAK
from torch import Tensor

from anyflex.plugin import (
    DTYPES,
    OPERATIONS,
    ModGraph,
    Node,
    differentiate,
    operand_classes,
    type_class,
)
from anyflex_cpu.index_ranges import LIMITS, WIDE_LIMITS

pytest.importorskip("llvmlite", reason="mods are compiled by llvmlite, the extra `jit`")

from anyflex_cpu import jit_engine
from anyflex_cpu.jit_engine import Target, assemble, host_target
from anyflex_cpu.llvm_lowering import LLVM

I64, F32, BOOL = torch.int64, torch.float32, torch.bool
ROWS, COLUMNS = 5, 37

FLOATS = (
    "0 -0.0 1 -1 0.5 -0.5 1.5 2.5 -2.5 3 -3 0.1 -0.3 0.7 1e-3 -1e-3 1e-5 7.25 -7.25 10 20 -20 "
    "30 88.5 -88.5 100 -103.5 200 -200 1e4 -1e5 1e6 3e38 -3e38 1e-30 1e-42 -1e-42 inf -inf nan "
    "0.9999 1.0001 127.5 -127.5 0.92 0.921 3.9 4.1 9.0 -9.1 15.75 65504"
)
INTS = "0 1 -1 2 -2 3 -3 5 7 -7 8 31 32 63 64 100 -100 127 -128 255 1000 -1000"


def values(dtype: torch.dtype) -> Tensor:
    """Numbers of a type, edges included."""
    if dtype is BOOL:
        return torch.tensor([True, False, True, True, False])
    if dtype.is_floating_point:
        found = torch.tensor([float(word) for word in FLOATS.split()], dtype=torch.float64)
        return found.to(dtype)
    limits = torch.iinfo(dtype)
    numbers = [int(word) for word in INTS.split()]
    numbers += [limits.min, limits.min + 1, limits.max, limits.max - 1]
    return torch.tensor(sorted({n for n in numbers if limits.min <= n <= limits.max}), dtype=dtype)


class Graph:
    """Nodes under construction."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, operation, dtype, *arguments, attribute=None) -> int:
        self.nodes.append(Node(operation, dtype, arguments, attribute))
        return len(self.nodes) - 1

    def input(self, name, dtype=I64) -> int:
        return self.add("input", dtype, attribute=name)

    def const(self, value, dtype) -> int:
        return self.add("const", dtype, attribute=value)

    def made(self, output=None) -> ModGraph:
        return ModGraph(tuple(self.nodes), len(self.nodes) - 1 if output is None else output)


def operands_of(operation: str, dtype: torch.dtype) -> tuple[Graph, list[int], list[Tensor]]:
    """A graph that reads one pair of operands a pair of (q_idx, kv_idx): x of the row's and the
    column's numbers, in a table of all combinations."""
    arity = OPERATIONS[operation]
    numbers = values(dtype)
    graph = Graph()
    q, k = graph.input("q_idx"), graph.input("kv_idx")
    if arity == 1:
        table = numbers.repeat(-(-ROWS * COLUMNS // len(numbers)))[: ROWS * COLUMNS]
        return graph, [graph.add("load", dtype, q, k, attribute=0)], [table.view(ROWS, COLUMNS)]
    # The operands are read as pairs, not as rows and columns, so that both are vectors.
    count = len(numbers)
    x = numbers.view(-1, 1).expand(count, count).contiguous()
    y = numbers.view(1, -1).expand(count, count).contiguous()
    first = graph.add("load", dtype, q, k, attribute=0)
    second = graph.add("load", dtype, q, k, attribute=1)
    return graph, [first, second], [x, y]


def run_value(graph: ModGraph, tile: NativeTile, limits=LIMITS) -> Tensor:
    """The graph's result for each pair, as float32, by its native function."""
    tile.run(compiled(score=graph, captured=tile.captured, limits=limits).score)
    return tile.score[:, : tile.columns]


def parts(graph: Graph, result: int) -> tuple[ModGraph, range]:
    """A score mod that returns a value of any type in pieces that float32 holds, and the numbers
    ``i0`` that select a piece."""
    dtype = graph.nodes[result].dtype
    if dtype is torch.float64:
        high = graph.add("cast", F32, result)
        back = graph.add("cast", torch.float64, high)
        rest = graph.add("cast", F32, graph.add("sub", dtype, result, back))
        first = graph.add("number", BOOL, attribute="i0")
        return graph.made(graph.add("where", F32, first, high, rest)), range(2)
    if dtype.itemsize <= 2 or dtype is F32:
        return graph.made(graph.add("cast", F32, result)), range(1)
    moved = graph.add("shr", dtype, result, graph.add("number", dtype, attribute="i0"))
    low = graph.add("and", dtype, moved, graph.const(0xFFFF, dtype))
    return graph.made(graph.add("cast", F32, low)), range(0, 8 * dtype.itemsize, 16)


def check_equal(
    parts: tuple[ModGraph, range], tables: list[Tensor], *, ulps: float, least=0.0, skip=None
) -> None:
    graph, numbers = parts
    mods = compiled(score=graph, captured=tables)
    rows, columns = tables[0].shape
    for number in numbers:
        tile = NativeTile(rows, columns, captured=tables, ints=(number,))
        (wanted,) = expected(tile, graph.nodes, [graph.output])
        tile.run(mods.score)
        got = tile.score[:, :columns]
        assert tile.notes == []
        if skip is not None:
            got, wanted = got.masked_fill(skip, 0), wanted.masked_fill(skip, 0)
        same = (got == wanted) | (got.isnan() & wanted.isnan())
        size = wanted.abs().clamp(min=torch.finfo(F32).tiny)
        close = (got - wanted).abs() <= ulps * torch.finfo(F32).eps * size + least
        bad = ~(same | close)
        if bad.any():
            where = bad.nonzero()[:5].tolist()
            lines = [
                f"{[t[r, c].item() for t in tables]}: {got[r, c].item()} not {wanted[r, c].item()}"
                for r, c in where
            ]
            raise AssertionError("\n".join([str(graph), *lines]))


CASES = [
    (operation, name)
    for operation, arity in OPERATIONS.items()
    if arity in (1, 2) and operation != "cast"
    for name, dtype in DTYPES.items()
    if type_class(dtype) in operand_classes(operation)
]
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


OLDER = {
    "avx2": ("haswell", "avx avx2 bmi bmi2 f16c fma lzcnt popcnt sse4.1 sse4.2 ssse3"),
    "sse2": ("x86-64", "sse sse2"),
}


@pytest.fixture
def older(request, monkeypatch) -> None:
    """Features of an older processor than this one."""
    cpu, features = OLDER[request.param]
    names = features.split()
    if not set(names) <= host_target().enabled:
        pytest.skip("this processor hasn't got that")
    target = Target(cpu, ",".join(f"+{name}" for name in names))
    monkeypatch.setattr(jit_engine, "host_target", lambda: target)


@pytest.mark.parametrize("older", OLDER, indirect=True)
@pytest.mark.parametrize(
    ("operation", "name"),
    [case for case in CASES if case[1] in ("f32", "f16", "i32", "i64") or case[0] == "not"][
        :: 1 if SOAK else 3
    ],
)
def test_an_operation_on_an_older_processor(older, operation: str, name: str) -> None:
    test_an_operation_means_what_torch_says(operation, name)


@pytest.mark.parametrize(("operation", "name"), CASES)
def test_an_operation_means_what_torch_says(operation: str, name: str) -> None:
    dtype = DTYPES[name]
    graph, operands, tables = operands_of(operation, dtype)
    result = graph.add(operation, BOOL if operation in COMPARISONS else dtype, *operands)
    skip = None
    if operation in ("floordiv", "mod", "fmod") and type_class(dtype) == "int":
        x, y = tables
        low = torch.iinfo(dtype).min
        # The result is arbitrary for a divisor of 0, and for the least integer over -1.
        skip = (y == 0) | ((x == low) & (y == -1) & (low < 0))
    if operation in ("floordiv", "mod", "fmod") and dtype.is_floating_point:
        # Where the quotient has no bound torch's vectors give NaN; C's fmod is exact.
        x, y = (table.float() for table in tables)
        skip = (x / y).isinf() & x.isfinite() & (y != 0)
    exact = operation not in FUNCTIONS_WITH_ERROR
    ulps = 0.0 if exact or not dtype.is_floating_point else ULPS.get(name, 4.0)
    # torch's own erf of small numbers has a larger error.
    least = 1e-6 if operation == "erf" else 0.0
    check_equal(parts(graph, result), tables, ulps=ulps, least=least, skip=skip)


# torch's sqrt isn't exact either: on AMD's processors its library is a step off.
FUNCTIONS_WITH_ERROR = frozenset(
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh "
    "asinh acosh atanh sigmoid erf erfc pow atan2 truediv floordiv mod".split()
)
# One step of the narrow type, in float32 steps: two correct functions may round to different
# sides.
ULPS = {"bf16": 2.0**16, "f16": 2.0**13}


def test_a_square_root_is_rounded_correctly() -> None:
    graph, operands, tables = operands_of("sqrt", F32)
    mods = compiled(score=graph.made(graph.add("sqrt", F32, *operands)), captured=tables)
    rows, columns = tables[0].shape
    tile = NativeTile(rows, columns, captured=tables)
    tile.run(mods.score)
    got, wanted = tile.score[:, :columns], tables[0].double().sqrt().float()
    assert torch.equal(got.nan_to_num(-1.0), wanted.nan_to_num(-1.0))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_a_cast_means_what_torch_says(source: str, target: str) -> None:
    graph, (x,), (table,) = operands_of("cast", DTYPES[source])
    result = graph.add("cast", DTYPES[target], x)
    skip = None
    if type_class(DTYPES[source]) == "float" and type_class(DTYPES[target]) == "int":
        # C leaves these results open, and torch's vectors and scalars differ.
        whole = table.double().trunc()
        limits = torch.iinfo(DTYPES[target])
        skip = ~((whole >= limits.min) & (whole <= limits.max))
        skip |= whole >= 2.0 ** (limits.bits - 1) if limits.bits == 64 else False
    check_equal(parts(graph, result), [table], ulps=0.0, skip=skip)


@pytest.mark.parametrize("name", DTYPES)
def test_where_and_numbers_of_every_type(name: str) -> None:
    dtype = DTYPES[name]
    graph = Graph()
    q, k = graph.input("q_idx"), graph.input("kv_idx")
    value = {"bool": True, "int": 100, "float": 1.7}[type_class(dtype)]
    test = graph.add("lt", BOOL, q, k)
    slot = "f0" if dtype.is_floating_point else "i1"
    number = graph.add("number", dtype, attribute=slot)
    result = graph.add("where", dtype, test, graph.const(value, dtype), number)
    made, numbers = parts(graph, result)
    for i in numbers:
        tile = NativeTile(4, 20, ints=(i, -3), floats=(1e39,), captured=())
        (wanted,) = expected(tile, made.nodes, [made.output])
        torch.testing.assert_close(run_value(made, tile), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("exponent", [0.5, -0.5, 2.0, 3.0, -1.0, -2.0, 4.0, 0.0, 1.5, -0.7])
@pytest.mark.parametrize("how", ["const", "number"])
def test_a_power_takes_the_paths_of_a_python_exponent(exponent: float, how: str) -> None:
    numbers = values(F32)
    graph = Graph()
    x = graph.add("load", F32, graph.input("kv_idx"), attribute=0)
    if how == "const":
        y = graph.const(exponent, F32)
    else:
        y = graph.add("number", F32, attribute="f0")
    graph.add("pow", F32, x, y)
    tile = NativeTile(1, len(numbers), captured=[numbers], floats=(exponent,))
    (wanted,) = expected(tile, graph.nodes, [len(graph.nodes) - 1])
    torch.testing.assert_close(
        run_value(graph.made(), tile), wanted, rtol=2e-6, atol=1e-37, equal_nan=True
    )


@pytest.mark.parametrize("divisor", [1, -1, 2, 3, -3, 8, 7, -8, 100, 0])
@pytest.mark.parametrize("operation", ["floordiv", "mod", "fmod"])
@pytest.mark.parametrize("name", ["u8", "i8", "i16", "i32", "i64"])
def test_division_by_a_constant(operation: str, divisor: int, name: str) -> None:
    dtype = DTYPES[name]
    if divisor < torch.iinfo(dtype).min:
        pytest.skip("no such number")
    graph, (x,), (table,) = operands_of("neg", dtype)
    result = graph.add(operation, dtype, x, graph.const(divisor, dtype))
    skip = torch.full_like(table, divisor == 0, dtype=BOOL)
    skip |= (table == torch.iinfo(dtype).min) & (divisor == -1)
    check_equal(parts(graph, result), [table], ulps=0.0, skip=skip)


@pytest.mark.parametrize("divisor", [3.0, 20.0, -7.0, 0.1, 1e-30, 1e30, 0.0, float("inf")])
def test_division_of_floats_by_a_constant_is_exact(divisor: float) -> None:
    graph, (x,), (table,) = operands_of("neg", F32)
    result = graph.add("truediv", F32, x, graph.const(divisor, F32))
    random = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 30
    for numbers in (table, random):
        check_equal((graph.made(result), range(1)), [numbers.contiguous()], ulps=0.0)


ACCURATE = {
    "exp": (-100, 88),
    "exp2": (-140, 127),
    "expm1": (-20, 88),
    "log": (1e-6, 1e6),
    "log2": (1e-6, 1e6),
    "log10": (1e-6, 1e6),
    "log1p": (-0.999, 100),
    "sin": (-1e4, 1e4),
    "cos": (-1e4, 1e4),
    "tanh": (-10, 10),
    "sigmoid": (-80, 80),
    "erf": (-4.5, 4.5),
}


@pytest.mark.parametrize("operation", ACCURATE)
def test_inlined_functions_are_within_4_ulp(operation: str) -> None:
    low, high = ACCURATE[operation]
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(128, 512, generator=generator) * (high - low) + low
    near = torch.randn(128, 512, generator=generator) * 0.5
    near = near.clamp(low, high)
    if operation.startswith("log") and operation != "log1p":
        near = 1 + (near * 0.1)
    for numbers in (spread, near):
        graph = Graph()
        score = graph.input("score", F32)
        graph.add(operation, F32, score)
        tile = NativeTile(128, 512)
        tile.score[:] = numbers
        got = run_value(graph.made(), tile)
        exact = getattr(torch, operation)(numbers.double())
        size = torch.finfo(F32).eps * exact.abs().clamp(min=2.0**-126) / 2
        error = ((got.double() - exact).abs() / size).max().item() / 2
        assert error <= 4, error


def causal_documents(captured: int = 0) -> Graph:
    graph = Graph()
    q, k = graph.input("q_idx"), graph.input("kv_idx")
    same = graph.add(
        "eq",
        BOOL,
        graph.add("load", torch.int32, q, attribute=captured),
        graph.add("load", torch.int32, k, attribute=captured),
    )
    graph.add("and", BOOL, same, graph.add("ge", BOOL, q, k))
    return graph


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 100, 511, 512])
@pytest.mark.parametrize("limits", [LIMITS, WIDE_LIMITS])
def test_a_mask_writes_bits_and_zeros_past_the_last_column(columns: int, limits) -> None:
    documents = (torch.arange(2000) // 90).to(torch.int32)
    graph = causal_documents().made()
    tile = NativeTile(33, columns, places=(1, 2, 600, 40), captured=[documents])
    tile.offset = (0, 0, 7, -3)
    (wanted,) = expected(tile, graph.nodes, [graph.output])
    tile.words.fill_(-1)
    tile.run(compiled(mask=graph, captured=[documents], limits=limits).mask, mask=True)
    assert torch.equal(tile.bits(), wanted)
    assert tile.notes == []


@pytest.mark.parametrize("name", ["q_idx", "kv_idx", "h", "const"])
def test_a_mask_that_reads_one_index_or_none(name: str) -> None:
    graph = Graph()
    if name == "const":
        graph.const(True, BOOL)
    else:
        graph.add("lt", BOOL, graph.input(name), graph.const(9, I64))
    made = graph.made()
    tile = NativeTile(20, 30, places=(0, 4, 0, 0))
    (wanted,) = expected(tile, made.nodes, [made.output])
    tile.run(compiled(mask=made).mask, mask=True)
    assert torch.equal(tile.bits(), wanted)


def test_a_comparison_with_a_number_beyond_int32() -> None:
    for value in (2**40, -(2**40), 3, 2**31, -(2**31) - 1):
        graph = Graph()
        distance = graph.add("sub", I64, graph.input("q_idx"), graph.input("kv_idx"))
        graph.add("lt", BOOL, distance, graph.add("number", I64, attribute="i0"))
        made = graph.made()
        tile = NativeTile(4, 40, ints=(value,))
        (wanted,) = expected(tile, made.nodes, [made.output])
        tile.run(compiled(mask=made).mask, mask=True)
        assert torch.equal(tile.bits(), wanted)


def test_index_arithmetic_beyond_int32_is_done_in_64_bits() -> None:
    graph = Graph()
    far = graph.add("mul", I64, graph.input("q_idx"), graph.const(1 << 20, I64))
    place = graph.add("add", I64, far, graph.input("kv_idx"))
    shifted = graph.add("shl", I64, graph.input("kv_idx"), graph.const(30, I64))
    graph.add("eq", BOOL, graph.add("sub", I64, place, shifted), graph.add("sub", I64, far, far))
    for value in (place, shifted):
        made, numbers = parts(graph, value)
        for i in numbers:
            tile = NativeTile(6, 50, places=(0, 0, 1 << 20, (1 << 24) - 60), ints=(i,))
            (wanted,) = expected(tile, made.nodes, [made.output])
            assert torch.equal(run_value(made, tile), wanted)


def reading(graph: Graph, dtype: torch.dtype, *indices: int) -> ModGraph:
    value = graph.add("load", dtype, *indices, attribute=0)
    if dtype is not F32:
        value = graph.add("cast", F32, value)
    return graph.made(graph.add("add", F32, graph.input("score", F32), value))


def tables() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    base = torch.randn(40, 90, generator=generator)
    return {
        "plain": base,
        "transposed": torch.randn(90, 40, generator=generator).t(),
        "expanded": base[:1].expand(40, 90),
        "narrow": base.expand(40, 90)[:, ::2].repeat(1, 2)[:, :90].contiguous()[:, :60],
        "sliced": torch.randn(40, 180, generator=generator)[:, ::2],
        "flipped rows": base[3:],
        "empty": torch.empty(0, 90),
        "empty columns": torch.empty(40, 0),
    }


def converted(given: Tensor, dtype: torch.dtype) -> Tensor:
    """The view times three, in another type, with the same strides."""
    whole = (3 * (given._base if given._base is not None else given)).to(dtype)
    return whole.as_strided(given.shape, given.stride(), given.storage_offset())


@pytest.mark.parametrize("limits", [LIMITS, WIDE_LIMITS])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["forwards", "backwards", "gather", "column"])
def test_reads_of_any_stride_and_type(kind: str, dtype: str, limits) -> None:
    graph = Graph()
    q, k = graph.input("q_idx"), graph.input("kv_idx")
    if kind == "forwards":
        indices = (q, graph.add("add", I64, k, graph.const(2, I64)))
    elif kind == "backwards":
        indices = (graph.const(3, I64), graph.add("sub", I64, q, k))
    elif kind == "gather":
        indices = (graph.add("mod", I64, graph.add("mul", I64, q, k), graph.const(37, I64)), k)
    else:
        indices = (graph.const(-1, I64), k)
    graph = reading(graph, DTYPES[dtype], *indices)
    live = torch.zeros(9, 50, dtype=BOOL)
    mods = None
    for way, given in tables().items():
        table = converted(given, DTYPES[dtype])
        # Sizes and strides are read at run time.
        mods = mods or compiled(score=graph, captured=[table], limits=limits)
        for q0 in (0, 30, 60):
            tile = NativeTile(9, 50, places=(0, 0, q0, 7), captured=[table], live=live)
            tile.score[:, :50] = torch.randn(9, 50)
            (wanted,) = expected(tile, graph.nodes, [graph.output])
            tile.run(mods.score)
            assert torch.equal(tile.score[:, :50], wanted), way
            # Dead pairs may read anywhere.
            assert tile.notes == []


@pytest.mark.parametrize("kind", ["score", "mask"])
@pytest.mark.parametrize("how", ["row", "column", "pair", "stream", "tile", "nested", "first dim"])
def test_a_live_read_outside_is_noted_and_a_dead_one_is_not(how: str, kind: str) -> None:
    table = torch.arange(40)
    square = torch.arange(1600).view(40, 40)
    graph = Graph()
    q, k = graph.input("q_idx"), graph.input("kv_idx")
    c = graph.const
    index = {
        "row": lambda: q,
        "column": lambda: k,
        "pair": lambda: graph.add("mul", I64, q, k),
        "stream": lambda: graph.add("sub", I64, k, q),
        "tile": lambda: graph.add("add", I64, graph.input("h"), c(38, I64)),
        "nested": lambda: graph.add("load", I64, k, attribute=0),
        "first dim": lambda: graph.add("sub", I64, k, c(60, I64)),
    }[how]()
    captured = [table, square]
    zero = c(0, I64)
    value = graph.add(
        "load", I64, *((index, zero) if how == "first dim" else (zero, index)), attribute=1
    )
    outside = {
        "row": torch.arange(30, 50)[:, None] >= 40,
        "column": torch.arange(35)[None] + 10 >= 40,
        "pair": torch.arange(30, 50)[:, None] * (torch.arange(35) + 10) >= 40,
        "stream": (torch.arange(35) + 10 - torch.arange(30, 50)[:, None]) < -40,
        "tile": torch.tensor([[True]]),
        "nested": torch.arange(35)[None] + 10 >= 40,
        "first dim": (torch.arange(35) + 10 - 60)[None] < -40,
    }[how].expand(20, 35)
    if kind == "score":
        made = graph.made(graph.add("cast", F32, value))
        live = ~outside
    else:
        made = graph.made(graph.add("lt", BOOL, value, graph.add("number", I64, attribute="i0")))
        live = None
    tile = NativeTile(20, 35, places=(0, 5, 30, 10), captured=captured, live=live, ints=(-1,))
    mods = compiled(**{kind: made}, captured=captured)
    function = mods.score if kind == "score" else mods.mask
    tile.run(function, mask=kind == "mask")
    assert tile.notes == []
    if kind == "score":
        if not outside.any():
            pytest.skip("nothing is outside here")
        first = outside.nonzero()[0].tolist()
        live[first[0], first[1]] = True
        tile = NativeTile(20, 35, places=(0, 5, 30, 10), captured=captured, live=live)
    else:
        tile.ints = (10**6,)
    tile.run(function, mask=kind == "mask")
    if outside.any():
        ((mod, position, _, _),) = tile.notes
        assert mod == (kind == "mask")
        assert position == (0 if how == "nested" else 1)


def test_an_index_that_depends_on_the_score_is_checked_on_the_unmodified_one() -> None:
    graph = Graph()
    score = graph.input("score", F32)
    index = graph.add("cast", torch.int32, score)
    table = torch.arange(10.0)
    graph.add("load", F32, index, attribute=0)
    tile = NativeTile(2, 20, captured=[table])
    tile.score[:, :20] = torch.arange(20.0) % 10
    tile.score[1, 7] = 12.0
    run_value(graph.made(), tile)
    assert tile.notes == [(0, 0, 0, 12)]
    assert tile.score[1, 7] == 9 and tile.score[0, 3] == 3


def gradients_of(graph: ModGraph, captured: list[Tensor], wanted: set[int], *, live=True) -> None:
    derivative = differentiate(graph, wanted_captured=frozenset(wanted))
    mods = compiled(derivative=derivative, captured=captured)
    generator = torch.Generator().manual_seed(3)
    for rows, columns in ((6, 50), (3, 16), (2, 500)):
        bits = torch.rand(rows, columns, generator=generator) < 0.6 if live else None
        tile = NativeTile(rows, columns, places=(0, 2, 3, 1), captured=captured, live=bits)
        alive = torch.ones(rows, columns, dtype=BOOL) if bits is None else bits
        tile.score[:, :columns] = torch.randn(rows, columns, generator=generator)
        tile.grad[:, :columns] = torch.randn(rows, columns, generator=generator)
        tile.grad[:, :columns][~alive] = 0
        tile.want_gradients(sorted(wanted))
        score, sums, sizes = expected_gradients(tile, derivative, alive)
        # The memory of a dead pair doesn't affect the result.
        tile.grad[:, :columns][~alive] = torch.nan
        tile.score[:, :columns][~alive] = torch.nan
        tile.run(mods.score_backward)
        got = tile.grad[:, :columns]
        torch.testing.assert_close(got, score, rtol=2e-6, atol=1e-6)
        assert (got[~alive] == 0).all()
        for position in wanted:
            total = tile.sums[position]
            error = (total - sums[position]).abs()
            assert (error <= 1e-5 * sizes[position] + 1e-6).all(), (error.max(), position)


def learned(graph: Graph, *indices: int, captured: int = 0) -> int:
    return graph.add("load", F32, *indices, attribute=captured)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("how", ["0-d", "head", "row", "column", "stream", "backwards", "gather"])
def test_gradients_of_a_captured_bias(how: str, live: bool) -> None:
    graph = Graph()
    q, k, h = (graph.input(name) for name in ("q_idx", "kv_idx", "h"))
    indices = {
        "0-d": (),
        "head": (h,),
        "row": (q,),
        "column": (k,),
        "stream": (h, q, k),
        "backwards": (graph.add("sub", I64, q, k),),
        "gather": (graph.add("mod", I64, graph.add("mul", I64, q, k), graph.const(13, I64)),),
    }[how]
    shape = {"0-d": (), "head": (4,), "stream": (4, 9, 800)}.get(how, (760,))
    table = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    value = learned(graph, *indices)
    score = graph.input("score", F32)
    graph.add("mul", F32, graph.add("tanh", F32, graph.add("add", F32, score, value)), value)
    gradients_of(graph.made(), [table], {0}, live=live)


def test_a_gradient_without_a_score_and_one_without_a_scatter() -> None:
    graph = Graph()
    score = graph.input("score", F32)
    gradients_of(graph.made(graph.add("sin", F32, score)), [], set())
    graph = Graph()
    graph.input("score", F32)
    value = learned(graph, graph.input("kv_idx"))
    gradients_of(graph.made(value), [torch.randn(20)], {0})


def test_an_unwanted_or_empty_gradient_is_left_alone() -> None:
    graph = Graph()
    score = graph.input("score", F32)
    graph.add("mul", F32, score, learned(graph, graph.input("kv_idx")))
    derivative = differentiate(graph.made(), wanted_captured=frozenset({0}))
    for table in (torch.randn(20), torch.empty(0)):
        mods = compiled(derivative=derivative, captured=[table])
        tile = NativeTile(3, 20, captured=[table])
        tile.score.fill_(1.0)
        tile.grad.fill_(1.0)
        tile.run(mods.score_backward)
        wanted = table.expand(3, 20) if table.numel() else torch.zeros(3, 20)
        assert torch.equal(tile.grad[:, :20], wanted)


def test_the_table_covers_every_operation() -> None:
    assert LLVM.problems() == []
    assert {operation for operation, _ in CASES} | {"where", "cast", "load", "number", "const"} | {
        "input"
    } == set(OPERATIONS)


def test_code_that_is_not_valid_is_refused_and_does_not_end_the_process() -> None:
    bad = "define i32 @f(i32 %x) {\nentry:\n  br label %entry\n}\n"
    with pytest.raises(RuntimeError, match="block"):
        assemble(bad, host_target())


def test_object_code_is_loaded_from_the_artifacts() -> None:
    artifacts = NoArtifacts()
    graph = causal_documents().made()
    documents = torch.zeros(50, dtype=torch.int32)
    compiled(mask=graph, captured=[documents], artifacts=artifacts)
    (name,) = artifacts.kept
    before = artifacts.kept[name]
    mods = compiled(mask=graph, captured=[documents], artifacts=artifacts)
    assert artifacts.kept == {name: before}
    tile = NativeTile(4, 30, captured=[documents])
    tile.run(mods.mask, mask=True)
    assert torch.equal(tile.bits(), torch.arange(4)[:, None] >= torch.arange(30))


def test_threads_compile_and_run_at_once() -> None:
    failures = []

    def work(number: int) -> None:
        graph = Graph()
        score = graph.input("score", F32)
        graph.add("add", F32, score, graph.const(float(number), F32))
        tile = NativeTile(8, 64)
        tile.score.fill_(1.0)
        if not (run_value(graph.made(), tile) == 1 + number).all():
            failures.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_compiles_and_runs() -> None:
    graph = Graph()
    graph.add("exp", F32, graph.input("score", F32))
    mods = compiled(score=graph.made())
    child = os.fork()
    if child == 0:
        tile = NativeTile(2, 16)
        tile.score.zero_()
        tile.run(mods.score)
        fine = bool((tile.score == 1).all())
        tile.score.zero_()
        tile.run(compiled(score=graph.made()).score)
        os._exit(0 if fine and bool((tile.score == 1).all()) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_memory_does_not_grow_with_the_mods_that_were_compiled() -> None:
    code = (
        "import sys\n"
        f"sys.path[:0] = {sys.path!r}\n"
        "import resource, gc, torch\n"
        "from native_tiles import compiled\n"
        "from anyflex.plugin import ModGraph, Node\n"
        "def one(i):\n"
        "    nodes = (Node('input', torch.float32, (), 'score'),\n"
        "             Node('const', torch.float32, (), float(i)),\n"
        "             Node('add', torch.float32, (0, 1)))\n"
        "    compiled(score=ModGraph(nodes, 2))\n"
        "for i in range(20): one(i)\n"
        "gc.collect()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for i in range(80): one(i)\n"
        "gc.collect()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=300, capture_output=True, text=True
    )
    # Growth in KiB: a leaked engine would be 20 a mod.
    assert int(done.stdout) < 80 * 20, done.stdout
