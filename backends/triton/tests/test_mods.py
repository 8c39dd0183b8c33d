"""Operations, conversions and constants as Triton source, against core's evaluation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from tile_case import Case, M, N
from torch import Tensor

from anyflex.plugin import DTYPES, OPERATIONS, ModGraph, Node, operand_classes, parse_graph
from anyflex_triton.lowering import EARLY, TRITON, cap_factors
from anyflex_triton.mods import write_source

# numpy warns of divisions by zero.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FLOATS = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.5, -2.5, 3.0, -7.25, 0.3, -0.04, 1e-4]
FLOATS += [20.25, -30.5, 88.0, 1000.0, math.inf, -math.inf, math.nan]
INTEGERS = [0, 1, -1, 2, -2, 3, -3, 5, 7, 8, -9, 31, 32, -32, 63, 64, -65, 100, 127, -128]
OPERAND_TYPES = {
    "bool": ("bool",),
    "int": ("u8", "i8", "i16", "i32", "i64"),
    "float": ("f16", "bf16", "f32", "f64"),
}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def values_of(name: str) -> Tensor:
    dtype = DTYPES[name]
    if name == "bool":
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        return torch.tensor(FLOATS, dtype=torch.float64).to(dtype)
    limits = torch.iinfo(dtype)
    kept = [v for v in INTEGERS if limits.min <= v <= limits.max]
    return torch.tensor([*kept, limits.min, limits.max, limits.max - 1], dtype=dtype)


def pairs(name: str) -> tuple[Tensor, Tensor]:
    """Return [M * N] values: all pairs of tricky ones, some repeated."""
    values = values_of(name)
    first, second = torch.meshgrid(values, values, indexing="ij")
    again = -(-M * N // first.numel())
    return first.flatten().repeat(again)[: M * N], second.flatten().repeat(again)[: M * N]


PAIR = "input i64 - q_idx;input i64 - kv_idx;const i64 - 32;mul i64 0,2 -;add i64 3,1 -"


def operation_nodes(operation: str, name: str) -> list[Node]:
    """Two captured tensors are the operands, so that no type is converted on the way."""
    dtype, count = DTYPES[name], OPERATIONS[operation]
    nodes = list(parse_graph(f"{PAIR};=4").nodes)
    nodes += [Node("load", dtype, (4,), 0), Node("load", dtype, (4,), 1)]
    arguments = (5, 6)[:count]
    if count == 3:
        nodes.append(Node("lt", torch.bool, (5, 6)))
        arguments = (7, 5, 6)
    nodes.append(Node(operation, torch.bool if operation in COMPARISONS else dtype, arguments))
    return nodes


def checked(nodes: list[Node], captured: Sequence[Tensor], skip: Tensor | None = None) -> None:
    """Compare the last node's value with core's."""
    result = nodes[-1].dtype
    last = len(nodes) - 1
    wanted = Case(None, captured=captured).evaluated(nodes, [last])[0].expand(M, N)
    keep = torch.ones(M, N, dtype=torch.bool) if skip is None else ~skip.view(M, N)
    if not result.is_floating_point:
        # float32 can't tell wide integers apart, so the mod compares them.
        nodes = [*nodes, Node("load", result, (4,), len(captured))]
        nodes.append(Node("eq", torch.bool, (last, last + 1)))
        case = Case(
            None, ModGraph(tuple(nodes), last + 2), [*captured, wanted.reshape(-1).contiguous()]
        )
        equal = case.run("mask_mod", "mask")
        assert equal[keep].eq(1).all(), (equal == 0).logical_and(keep).nonzero()[:5]
        return
    found = Case(ModGraph(tuple(nodes), last), captured=captured).run("score_mod", "score")
    # The last bit of the narrow types may be rounded either way.
    rtol = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(result, 6e-7)
    torch.testing.assert_close(
        found[keep], wanted.float()[keep], rtol=rtol, atol=2e-38, equal_nan=True
    )
    assert ((found == 0) & (found.signbit() != wanted.signbit()) & keep).sum() == 0


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (operation, name)
        for operation, count in OPERATIONS.items()
        if count and operation not in ("cast", "detach")
        for kind in operand_classes(operation)
        for name in OPERAND_TYPES[kind]
    ],
)
def test_an_operation_has_torch_s_meaning(operation: str, name: str) -> None:
    first, second = pairs(name)
    skip = None
    if operation == "pow" and not DTYPES[name].is_floating_point:
        # torch has no answer for a negative exponent of 0.
        skip = (first == 0) & (second < 0)
    if operation in ("floordiv", "mod", "fmod") and not DTYPES[name].is_floating_point:
        # Division by 0 gives any number; torch's of the minimum by -1 traps or wraps.
        skip = (second == 0) | ((first == torch.iinfo(DTYPES[name]).min) & (second + 1 == 0))
        second = torch.where(skip, 1, second)
    checked(operation_nodes(operation, name), [first, second], skip)


def test_the_table_lacks_no_operation() -> None:
    assert [found for found in TRITON.problems() if repr(EARLY) not in found] == []


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_a_cast_has_torch_s_meaning(source: str, target: str) -> None:
    first, _ = pairs(source)
    first = first.repeat_interleave(len(values_of(source)))[: M * N]
    if DTYPES[source].is_floating_point and not DTYPES[target].is_floating_point:
        # A number that doesn't fit the integer type becomes any number.
        bound = 1e9 if target in ("i32", "i64") else 1e4
        held = first.isfinite() & (first.double().abs() < bound)
        first = torch.where(held | (DTYPES[target] is torch.bool), first, 1)
    nodes = [*parse_graph(f"{PAIR};=4").nodes, Node("load", DTYPES[source], (4,), 0)]
    checked([*nodes, Node("cast", DTYPES[target], (5,))], [first])


CONSTANTS = [
    ("f32", -0.0), ("f32", math.inf), ("f32", math.nan), ("f32", 1e300), ("f32", 0.1),
    ("f16", 1e5), ("f16", 0.1), ("bf16", 0.1), ("bf16", -1e39), ("f64", 0.1), ("f64", 1e300),
    ("i8", 300), ("u8", -1), ("i32", 1 << 31), ("i64", 1 << 63), ("i64", -(1 << 63)),
    ("i64", 1 << 40), ("i64", -5), ("bool", True), ("bool", False), ("i16", -1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), CONSTANTS)
def test_a_constant_is_as_its_type_holds_it(name: str, value: float) -> None:
    checked(list(parse_graph(f"{PAIR};const {name} - {value};=5").nodes), [])


@pytest.mark.parametrize(
    ("operation", "number", "name"),
    [
        (operation, number, name)
        for operation in ("floordiv", "mod", "fmod", "shl", "shr", "pow", "mul")
        for number in (1, -1, 2, 3, -3, 7, 8, 64, -8, 100, 0)
        for name in ("i64", "i32", "i8", "u8")
        # Division by 0 gives any number, and torch takes no constant negative powers.
        if number != 0 or operation not in ("floordiv", "mod", "fmod")
        if number >= 0 or (name != "u8" and operation != "pow")
    ],
)
def test_an_integer_operation_with_a_constant_has_torch_s_meaning(
    operation: str, number: int, name: str
) -> None:
    dtype = DTYPES[name]
    for first in (pairs(name)[0], None):
        nodes = list(parse_graph(f"{PAIR};=4").nodes)
        # The operand is any value, or an index, whose range is known.
        place = 4 if first is None else 5
        nodes.append(Node("load", dtype, (4,), 0))
        if first is None:
            if name != "i64":
                continue
            nodes[-1] = Node("sub", torch.int64, (0, 1))
            place = 5
        nodes.append(Node("const", dtype, (), number))
        least = first is not None and number == -1
        skip = first == torch.iinfo(dtype).min if least else None
        checked(
            [*nodes, Node(operation, dtype, (place, 6))], [] if first is None else [first], skip
        )


@pytest.mark.parametrize("exponent", [0, 1, 2, 64, 127, 128, 192, 255, None])
def test_a_power_of_bytes_knows_all_bits_of_the_exponent(exponent: int | None) -> None:
    first = torch.tensor([254, 2, 3, 255, 128, 1, 0, 200], dtype=torch.uint8).repeat(M * N // 8)
    nodes = [*parse_graph(f"{PAIR};=4").nodes, Node("load", torch.uint8, (4,), 0)]
    tables = [first]
    if exponent is None:
        nodes.append(Node("load", torch.uint8, (4,), 1))
        tables.append(torch.arange(M * N).to(torch.uint8))
    else:
        nodes.append(Node("const", torch.uint8, (), exponent))
    checked([*nodes, Node("pow", torch.uint8, (5, 6))], tables)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0, 3.0, -0.5, -1.0, -2.0, 0.0, 4.0, 1.5, -3.0])
@pytest.mark.parametrize("name", OPERAND_TYPES["float"])
def test_a_power_with_a_constant_is_torch_s(exponent: float, name: str) -> None:
    dtype = DTYPES[name]
    nodes = [*parse_graph(f"{PAIR};=4").nodes, Node("load", dtype, (4,), 0)]
    nodes.append(Node("const", dtype, (), exponent))
    checked([*nodes, Node("pow", dtype, (5, 6))], [pairs(name)[0]])


@pytest.mark.parametrize(
    ("operation", "low", "high"),
    [
        ("exp", -87, 88), ("expm1", -5, 88), ("exp2", -120, 120), ("log10", 1e-30, 1e30),
        ("log1p", -0.99, 1e4), ("tanh", -10, 10), ("sigmoid", -80, 80), ("sinh", -85, 85),
        ("cosh", -85, 85), ("asinh", -1e4, 1e4), ("acosh", 1, 1e4), ("atanh", -0.999, 0.999),
        ("asin", -1, 1), ("acos", -1, 1), ("atan", -50, 50), ("tan", -1.5, 1.5),
        ("erfc", -4, 9), ("rsqrt", 1e-3, 1e3), ("erf", -4, 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["f32", "f64"])
def test_functions_are_right_to_a_few_units_in_the_last_place(
    operation: str, low: float, high: float, name: str
) -> None:
    dtype = DTYPES[name]
    half = M * N // 2
    even = torch.linspace(low, high, half, dtype=torch.float64)
    # The values begin at tiny numbers, where relative errors show.
    small = torch.logspace(-12, 0, half, dtype=torch.float64) * min(
        abs(high), abs(low) or 1.0, 1.0
    )
    small = small * torch.tensor([1.0, -1.0]).repeat(half // 2) if low < 0 else small + max(low, 0)
    x = torch.cat([even, small]).to(dtype)
    nodes = [*parse_graph(f"{PAIR};=4").nodes, Node("load", dtype, (4,), 0)]
    nodes.append(Node(operation, dtype, (5,)))
    wide = [*nodes[:5], Node("load", torch.float64, (4,), 0), Node(operation, torch.float64, (5,))]
    (exact,) = Case(None, captured=[x.double()]).evaluated(wide, [6])
    if name == "f32":
        found = Case(ModGraph(tuple(nodes), 6), captured=[x]).run("score_mod", "score").double()
        error, unit = (found - exact).abs() / exact.abs().clamp_min(1e-300), 2.0**-23
    else:
        # The mod computes the difference.
        nodes += [Node("load", dtype, (4,), 1), Node("sub", dtype, (6, 7))]
        nodes.append(Node("truediv", dtype, (8, 7)))
        case = Case(ModGraph(tuple(nodes), 9), captured=[x, exact.reshape(-1).contiguous()])
        error = case.run("score_mod", "score").double().abs()
        error, unit = torch.where(exact == 0, 0.0, error), 2.0**-52
    assert error.max() <= (4 if name == "f32" else 24) * unit, (
        x[error.argmax()],
        error.max() / unit,
    )


def test_powers_are_right_to_a_few_units_in_the_last_place() -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.rand(M * N, generator=generator, dtype=torch.float64) * 12 - 6).exp().float()
    y = (torch.rand(M * N, generator=generator) * 28 - 14).float()
    nodes = operation_nodes("pow", "f32")
    found = Case(ModGraph(tuple(nodes), 7), captured=[x, y]).run("score_mod", "score").double()
    exact = torch.pow(x.double(), y.double()).view(M, N)
    held = (exact < 3e38) & (exact > 2e-38)
    assert ((found - exact).abs() / exact)[held].max() < 4 * 2.0**-23


def test_powers_of_ten_have_whole_logarithms() -> None:
    x = torch.tensor([10.0**k for k in range(-30, 31)]).repeat(9)[: M * N]
    nodes = [*parse_graph(f"{PAIR};=4").nodes, Node("load", torch.float32, (4,), 0)]
    nodes.append(Node("log10", torch.float32, (5,)))
    found = Case(ModGraph(tuple(nodes), 6), captured=[x]).run("score_mod", "score")
    assert found.flatten()[30:61].tolist() == [float(k) for k in range(31)]


SOFT_CAP = "input f32 - score;const f32 - 30.0;truediv f32 0,1 -;tanh f32 2 -;mul f32 1,3 -;"


@pytest.mark.parametrize(
    ("text", "factors"),
    [
        (f"{SOFT_CAP}=4", (30.0,)),
        (f"{SOFT_CAP}add f32 4,0 -;=5", (30.0,)),
        (f"{SOFT_CAP}add f32 4,4 -;=5", ()),
        (f"{SOFT_CAP}add f32 4,0 -;sub f32 5,4 -;=6", ()),
        (f"{SOFT_CAP}exp f32 4 -;=5", ()),
        (f"{SOFT_CAP}add f32 4,3 -;=5", (30.0, 1.0)),
        (f"{SOFT_CAP}add f32 3,3 -;=5", (1.0, 1.0)),
        (f"{SOFT_CAP}add f32 4,3 -;exp f32 5 -;=6", ()),
        ("input f32 - score;tanh f32 0 -;mul f32 0,1 -;=2", ()),
        ("input f32 - score;tanh f32 0 -;=1", (1.0,)),
        ("input f32 - score;tanh f32 0 -;add f32 1,0 -;=2", (1.0,)),
        ("input f32 - score;tanh f32 0 -;exp f32 1 -;=2", ()),
        ("input f32 - score;exp f32 0 -;=1", ()),
    ],
)
def test_a_soft_caps_tanh_is_found_if_it_adds_to_the_score(
    text: str, factors: tuple[float, ...]
) -> None:
    graph = parse_graph(text)
    spec = dataclasses.replace(Case(graph).spec, dtype=torch.float16)
    assert cap_factors(spec) == factors
    assert cap_factors(dataclasses.replace(spec, dtype=torch.float32)) == ()


def test_the_text_is_the_same_for_the_same_spec_and_int64_appears_where_it_must() -> None:
    short = parse_graph("input i64 - q_idx;input i64 - kv_idx;sub i64 0,1 -;const i64 - 8;"
                        "lt bool 2,3 -;=4")  # fmt: skip
    wide = parse_graph("input i64 - q_idx;const i64 - 104729;mul i64 0,1 -;const i64 - 97;"
                       "mod i64 2,3 -;const i64 - 40;lt bool 4,5 -;=6")  # fmt: skip
    assert "int64" not in write_source(Case(None, short).spec)
    assert "int64" in write_source(Case(None, wide).spec)
    assert write_source(Case(None, wide).spec) == write_source(Case(None, wide).spec)
    case = Case(None, wide, first_q=100_000_000)
    assert torch.equal(case.run("mask_mod", "mask"), case.value(wide).float())
