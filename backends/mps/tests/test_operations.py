"""Each operation's Metal text, for every dtype that it takes, against torch in float64."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import pytest
import torch
from emulator import Numerics
from emulator.lint import conversions, findings
from metal_values import source_of_nodes, spec_of, values_of_nodes
from torch import Tensor

from anyflex.plugin import DTYPES, OPERATIONS, Node, evaluate, operand_classes
from anyflex_mps.lowering import METAL, ModProgram
from anyflex_mps.operations import FUNCTIONS, functions_for

FLOATS = [0.0, 0.5, 1.0, 1.5, 2.5, 3.0, 7.25, 0.3, 0.04, 1e-4, 20.25, 30.5, 88.0, 104.0, 1000.0]
FLOATS += [8388607.5, 8388609.0, 16777216.0, 1e-10, 0.9999999, 1.0000001, 1e15, 1.7e38]
FLOATS += [math.inf, torch.finfo(torch.float32).max, 2.0**-126, 2.0**-149, 1e-40, 65504.0]
INTEGERS = [0, 1, -1, 2, -2, 3, -3, 5, 7, 8, -9, 31, 32, -32, 63, 64, -65, 100, 127, -128]
TYPES = {
    "bool": ("bool",),
    "int": ("u8", "i8", "i16", "i32", "i64"),
    "float": ("f16", "bf16", "f32"),
}
HELD_TYPES = [name for names in TYPES.values() for name in names]
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
RANDOM = 3000


def special_values(name: str) -> Tensor:
    dtype = DTYPES[name]
    if name == "bool":
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        values = torch.tensor(FLOATS, dtype=torch.float64)
        values = torch.cat([values, -values, torch.tensor([math.nan])])
        return values.float().to(dtype)
    limits = torch.iinfo(dtype)
    kept = [v for v in INTEGERS if limits.min <= v <= limits.max]
    return torch.tensor([*kept, limits.min, limits.max, limits.max - 1], dtype=dtype)


def random_values(name: str, seed: int, count: int = RANDOM) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[name]
    if name == "bool":
        return torch.rand(count, generator=generator) < 0.5
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        wide = torch.randint(limits.min, limits.max, (count,), generator=generator, dtype=dtype)
        low = max(limits.min, -20)
        near = torch.randint(low, 20, (count,), generator=generator).to(dtype)
        return torch.where(torch.rand(count, generator=generator) < 0.5, wide, near)
    # Each function has its digits to lose somewhere: near 0, near 1, within 100, anywhere.
    unit = torch.rand(count, generator=generator, dtype=torch.float64) * 2 - 1
    exponents = torch.rand(count, generator=generator, dtype=torch.float64)
    kinds = [unit, unit * 100, unit * 10, unit.sign() * 2 ** (exponents * 20 - 20)]
    kinds += [1 + unit * 2 ** (exponents * 20 - 20), unit.sign() * 2 ** (exponents * 250 - 125)]
    drawn = torch.randint(len(kinds), (count,), generator=generator)
    return torch.stack(kinds).gather(0, drawn[None])[0].float().to(dtype)


def operands(name: str) -> tuple[Tensor, Tensor]:
    """Return all pairs of special values, then random ones."""
    values = special_values(name)
    first, second = torch.meshgrid(values, values, indexing="ij")
    return (
        torch.cat([first.flatten(), random_values(name, 1)]),
        torch.cat([second.flatten(), random_values(name, 2)]),
    )


PLACE = Node("input", torch.int64, (), "q_idx")


def columns(count: int) -> Tensor:
    return torch.arange(count) * 37 % 101


def graph_of(name: str) -> tuple[list[Node], dict[str, int]]:
    """Return nodes with every operation that takes the type, and each one's position. Captured
    tensors are the operands, so that no type is converted on the way."""
    dtype = DTYPES[name]
    kind = next(kind for kind, names in TYPES.items() if name in names)
    nodes = [PLACE, Node("load", dtype, (0,), 0), Node("load", dtype, (0,), 1)]
    nodes.append(Node("lt", torch.bool, (1, 2)))
    positions = {}
    for operation, count in OPERATIONS.items():
        if count and operation != "cast" and kind in operand_classes(operation):
            arguments = (3, 1, 2) if count == 3 else (1, 2)[:count]
            result = torch.bool if operation in COMPARISONS else dtype
            positions[operation] = len(nodes)
            nodes.append(Node(operation, result, arguments))
    return nodes, positions


def widened(nodes: list[Node]) -> list[Node]:
    """Return the nodes with all floats as float64."""
    return [
        dataclasses.replace(node, dtype=torch.float64) if node.dtype.is_floating_point else node
        for node in nodes
    ]


def exact(nodes: list[Node], wanted: list[int], captured: list[Tensor]) -> list[Tensor]:
    """Return torch's values, those of floats in float64."""
    count = len(captured[0])
    found = evaluate(
        widened(nodes),
        wanted,
        inputs={"q_idx": torch.arange(count), "kv_idx": columns(count)},
        captured=[t.double() if t.is_floating_point() else t for t in captured],
        ints=(),
        floats=(),
    )
    return [each.expand(count) for each in found]


def emulated(nodes: list[Node], wanted: list[int], captured: list[Tensor]) -> list[Tensor]:
    return values_of_nodes(nodes, wanted, captured, kv_idx=columns(len(captured[0])))


@functools.cache
def results(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what the emulator finds for each operation of a type, and torch's."""
    nodes, positions = graph_of(name)
    wanted, captured = list(positions.values()), list(operands(name))
    both = zip(
        positions, emulated(nodes, wanted, captured), exact(nodes, wanted, captured), strict=True
    )
    return {operation: (found, value) for operation, found, value in both}


def check(
    found: Tensor, wanted: Tensor, dtype: torch.dtype, keep: Tensor | None = None, ulps: int = 4
) -> None:
    """Compare with values in float64, which may be off by units of float32's last place before
    they are rounded to the type."""
    keep = torch.ones_like(found, dtype=torch.bool) if keep is None else keep
    if not dtype.is_floating_point:
        wrong = keep & (found != wanted.long())
    else:
        size = wanted.abs().clamp_min(2.0**-126)
        unit = ulps * 2.0 ** (size.log2().floor() - 23)
        unit = unit.nan_to_num(0.0, 0.0, 0.0)
        low, high = ((wanted + side).float().to(dtype).double() for side in (-unit, unit))
        near = (low <= found) & (found <= high)
        tiny = (wanted.abs() <= 2.0**-126) & (found.abs() <= 2.0**-126)
        sign = (wanted != 0) | (found != 0) | (wanted.signbit() == found.signbit())
        same = ((near | tiny) & sign) | (found.isnan() & wanted.isnan())
        wrong = keep & ~same
    at = wrong.nonzero().flatten()[:8]
    assert not wrong.any(), (int(wrong.sum()), at, found[at], wanted[at])


def kept(operation: str, name: str) -> Tensor | None:
    """Return where torch has an answer that is documented."""
    first, second = operands(name)
    if operation in ("floordiv", "mod", "fmod"):
        if first.is_floating_point():
            # Quotients beyond 2^46 are not promised.
            quotient = (first.double() / second.double()).abs()
            return ~((quotient > 2.0**46) & quotient.isfinite())
        # Division by 0 gives any number; torch's of the minimum by -1 traps or wraps.
        return second != 0
    if operation == "pow" and not first.is_floating_point():
        # torch has no answer for a negative exponent of 0.
        return (first != 0) | (second >= 0)
    return None


CASES = [
    (operation, name)
    for operation, count in OPERATIONS.items()
    if count and operation != "cast"
    for kind in operand_classes(operation)
    for name in TYPES[kind]
]


@pytest.mark.parametrize(("operation", "name"), CASES)
def test_an_operation_is_torch_s_within_4_units_in_the_last_place(
    operation: str, name: str
) -> None:
    found, wanted = results(name)[operation]
    dtype = torch.bool if operation in COMPARISONS else DTYPES[name]
    check(found, wanted, dtype, kept(operation, name))


def test_functions_keep_their_accuracy_on_many_values() -> None:
    near = torch.linspace(-1.5, 1.5, 30001)
    captured = [torch.cat([near, random_values("f32", 7, 30000)])]
    nodes, positions = [PLACE, Node("load", torch.float32, (0,), 0)], {}
    for operation in OPERATIONS:
        if OPERATIONS[operation] == 1 and operand_classes(operation) == ("float",):
            positions[operation] = len(nodes)
            nodes.append(Node(operation, torch.float32, (1,)))
    wanted = list(positions.values())
    both = zip(emulated(nodes, wanted, captured), exact(nodes, wanted, captured), strict=True)
    for found, value in both:
        check(found, value, torch.float32)


@pytest.mark.parametrize(
    ("numerics", "ulps"),
    [
        (Numerics(flush_denormals=True), 4),
        (Numerics(contract=True), 4),
        (Numerics(ulps=1), 6),
        (Numerics(ulps=4), 16),
    ],
    ids=["subnormals flushed", "contracted", "own functions 1 ulp off", "4 ulp off"],
)
def test_other_arithmetic_than_the_emulator_s_costs_few_units(
    numerics: Numerics, ulps: int
) -> None:
    nodes, positions = graph_of("f32")
    wanted, captured = list(positions.values()), list(operands("f32"))
    found = values_of_nodes(
        nodes, wanted, captured, kv_idx=columns(len(captured[0])), numerics=numerics
    )
    normal = torch.ones(len(captured[0]), dtype=torch.bool)
    for each in captured:
        normal &= (each == 0) | ~(each.abs() < 2.0**-126)
    for operation, its, value in zip(
        positions, found, exact(nodes, wanted, captured), strict=True
    ):
        documented = kept(operation, "f32")
        keep = normal if documented is None else normal & documented
        dtype = torch.bool if operation in COMPARISONS else torch.float32
        check(its, value, dtype, keep, ulps)


def test_powers_of_two_have_integer_logarithms_whatever_metal_s_function_says() -> None:
    exponents = torch.arange(-126.0, 128.0)
    nodes = [PLACE, Node("load", torch.float32, (0,), 0), Node("log2", torch.float32, (1,))]
    captured, kv_idx = [exponents.exp2()], columns(len(exponents))
    inexact = Numerics(ulps=4)
    (found,) = values_of_nodes(nodes, [2], captured, kv_idx=kv_idx, numerics=inexact)
    assert found.equal(exponents)


def broken_rules(nodes: list[Node], wanted: list[int], captured: list[Tensor]) -> list[str]:
    source = source_of_nodes(nodes, wanted, captured, 1)
    return [str(each) for each in (*findings(source), *conversions(source))]


@pytest.mark.parametrize("name", HELD_TYPES)
def test_operations_keep_the_rules_of_metal_source(name: str) -> None:
    nodes, positions = graph_of(name)
    assert broken_rules(nodes, list(positions.values()), list(operands(name))) == []


def test_the_table_lacks_no_operation() -> None:
    assert METAL.problems() == []


def test_the_functions_that_a_text_calls_come_each_once_and_before_they_are_called() -> None:
    text = functions_for("op_log1p(x) + op_log(x) * op_place_int(0, 1L)")
    defined = re.findall(r"static inline \w+ (op_\w+)\(", text)
    assert sorted(set(defined)) == sorted(defined)
    assert set(defined) == {
        "op_leading", "op_log2_in_two", "op_scaled_log2", "op_log", "op_log1p", "op_place_int"
    }  # fmt: skip
    for name, function in FUNCTIONS.items():
        called = set(re.findall(r"\bop_\w+(?=\()", function)) - {name}
        names = list(FUNCTIONS)
        assert all(names.index(each) < names.index(name) for each in called)


@pytest.mark.parametrize("source", HELD_TYPES)
def test_casts_are_torch_s(source: str) -> None:
    first, _ = operands(source)
    dtype = DTYPES[source]
    captured, nodes = [], [PLACE]
    for place, target in enumerate(HELD_TYPES):
        given = first
        if dtype.is_floating_point and not DTYPES[target].is_floating_point and target != "bool":
            # A number that doesn't fit the integer type becomes any number.
            bound = {"i64": 2.0**63, "i32": 2.0**31}.get(target, 2.0**31)
            given = torch.where(first.isfinite() & (first.double().abs() < bound), first, 1)
        captured.append(given)
        nodes.append(Node("load", dtype, (0,), place))
        nodes.append(Node("cast", DTYPES[target], (len(nodes) - 1,)))
    wanted = list(range(2, len(nodes), 2))
    assert broken_rules(nodes, wanted, captured) == []
    values = evaluate(
        nodes, wanted, inputs={"q_idx": torch.arange(len(first))}, captured=captured, ints=(),
        floats=(),
    )  # fmt: skip
    for target, found, value in zip(
        HELD_TYPES, emulated(nodes, wanted, captured), values, strict=True
    ):
        check(found, value.double() if value.is_floating_point() else value, DTYPES[target])


CONSTANTS = [
    ("f32", -0.0), ("f32", math.inf), ("f32", -math.inf), ("f32", math.nan), ("f32", 1e300),
    ("f32", 0.1), ("f32", 2.0**-149), ("f16", 1e5), ("f16", 0.1), ("bf16", 0.1), ("bf16", -1e39),
    ("i8", -128), ("i8", 44), ("u8", 255), ("i16", -32768), ("i16", -1), ("i32", -(1 << 31)),
    ("i32", (1 << 31) - 1), ("i64", -(1 << 63)), ("i64", (1 << 63) - 1), ("i64", 1 << 40),
    ("i64", -(1 << 31)), ("i64", 1 << 31), ("i64", -5), ("bool", True), ("bool", False),
]  # fmt: skip


def test_constants_are_as_their_types_hold_them() -> None:
    nodes = [Node("const", DTYPES[name], (), value) for name, value in CONSTANTS]
    assert broken_rules(nodes, list(range(len(nodes))), []) == []
    found = values_of_nodes(nodes, range(len(nodes)), [], kv_idx=columns(1))
    for (name, value), each in zip(CONSTANTS, found, strict=True):
        double = torch.tensor([value], dtype=torch.float64)
        wanted = double if DTYPES[name].is_floating_point else torch.tensor([value])
        check(each, wanted, DTYPES[name], ulps=0)


def test_numbers_of_a_call_are_read_from_their_slots() -> None:
    slots = [("i64", "i0"), ("i32", "i1"), ("f32", "f0"), ("bf16", "f1"), ("bool", "i2")]
    slots += [("i64", "i3"), ("u8", "i4")]
    nodes = [Node("number", DTYPES[name], (), slot) for name, slot in slots]
    # A captured tensor's sizes and strides come before the ints.
    found = values_of_nodes(
        nodes, range(len(nodes)), [torch.zeros(3, 5)], ints=[-7, 9, 1, 1 << 40, 200],
        floats=[0.25, 0.1], kv_idx=columns(1),
    )  # fmt: skip
    expected = [-7, 9, 0.25, torch.tensor(0.1).bfloat16().item(), 1, 1 << 40, 200]
    assert [each.item() for each in found] == expected


NUMBERS = (1, -1, 2, -2, 3, -3, 7, 8, 64, -8, 100, 0)


@pytest.mark.parametrize("name", ["i64", "i32", "i16", "i8", "u8", "index"])
def test_integer_operations_with_constants_are_torch_s(name: str) -> None:
    """An index is an int64 whose range is known: it is held as int."""
    dtype = DTYPES.get(name, torch.int64)
    first = operands(name)[0] if name != "index" else torch.zeros(200)
    nodes = [PLACE, Node("load", dtype, (0,), 0)]
    place = 1
    if name == "index":
        nodes += [Node("input", torch.int64, (), "kv_idx"), Node("sub", torch.int64, (0, 2))]
        place = 3
    wanted, labels = [], []
    for operation in ("floordiv", "mod", "fmod", "shl", "shr", "pow", "mul", "add", "sub"):
        for number in NUMBERS:
            if number == 0 and operation in ("floordiv", "mod", "fmod"):
                continue
            if number < 0 and (name == "u8" or operation == "pow"):
                continue
            nodes.append(Node("const", dtype, (), number))
            nodes.append(Node(operation, dtype, (place, len(nodes) - 1)))
            wanted.append(len(nodes) - 1)
            labels.append((operation, number))
    values = exact(nodes, wanted, [first])
    for (_, number), found, value in zip(
        labels, emulated(nodes, wanted, [first]), values, strict=True
    ):
        keep = torch.ones(len(first), dtype=torch.bool)
        if number == -1 and name != "index":
            # torch's quotient of the minimum by -1 traps or wraps.
            keep = first != torch.iinfo(dtype).min
        check(found, value, dtype, keep)


@pytest.mark.parametrize("name", ["f16", "bf16", "f32"])
def test_powers_with_a_constant_are_torch_s(name: str) -> None:
    dtype = DTYPES[name]
    first = operands(name)[0]
    nodes = [PLACE, Node("load", dtype, (0,), 0)]
    wanted = []
    exponents = [0.5, 1.0, 2.0, 3.0, -0.5, -1.0, -2.0, 0.0, 4.0, 1.5, -3.0]
    for exponent in exponents:
        nodes.append(Node("const", dtype, (), exponent))
        nodes.append(Node("pow", dtype, (1, len(nodes) - 1)))
        wanted.append(len(nodes) - 1)
    values = evaluate(
        nodes, wanted, inputs={"q_idx": torch.arange(len(first))}, captured=[first], ints=(),
        floats=(),
    )  # fmt: skip
    for found, value, precise in zip(
        emulated(nodes, wanted, [first]), values, exact(nodes, wanted, [first]), strict=True
    ):
        # At infinities and zeros torch's narrow types differ from its float64.
        special = ~first.isfinite() | (first == 0)
        check(found, value.double(), dtype, special)
        check(found, precise, dtype, ~special)


def test_remainders_of_large_quotients_are_exact() -> None:
    generator = torch.Generator().manual_seed(4)
    x, y, exponent = torch.rand(3, 20000, generator=generator)
    x, y = (1 + x) * 2.0 ** (20 + 26 * exponent).floor(), 1 + y
    nodes = [PLACE, Node("load", torch.float32, (0,), 0), Node("load", torch.float32, (0,), 1)]
    nodes += [Node(operation, torch.float32, (1, 2)) for operation in ("fmod", "mod", "floordiv")]
    fmod, mod, quotient = emulated(nodes, [3, 4, 5], [x, y])
    wanted = torch.fmod(x.double(), y.double())
    assert torch.equal(fmod.double(), wanted)
    assert torch.equal(mod.double(), wanted)
    check(quotient, torch.floor((x.double() - wanted) / y.double() + 0.5), torch.float32)


def test_powers_of_ten_have_whole_logarithms() -> None:
    x = torch.tensor([10.0**k for k in range(-30, 31)])
    nodes = [PLACE, Node("load", torch.float32, (0,), 0), Node("log10", torch.float32, (1,))]
    (found,) = emulated(nodes, [2], [x])
    assert found[30:].tolist() == [float(k) for k in range(31)]


def test_int64_appears_only_where_a_value_needs_it() -> None:
    short = [PLACE, Node("input", torch.int64, (), "kv_idx"), Node("sub", torch.int64, (0, 1))]
    short += [Node("const", torch.int64, (), 8), Node("lt", torch.bool, (2, 3))]
    wide = [PLACE, Node("const", torch.int64, (), 104729), Node("mul", torch.int64, (0, 1))]
    wide += [Node("const", torch.int64, (), 97), Node("mod", torch.int64, (2, 3))]
    for nodes, expected in ((short, False), (wide, True)):
        program = ModProgram.of(spec_of(), nodes)
        METAL.lower(nodes, program, [len(nodes) - 1])
        assert any("long" in line for line in program.lines) is expected
        # The remainder itself fits int again.
        assert program.types[f"v{len(program.lines) - 1}"] in ("bool", "int")
    (found,) = values_of_nodes(wide, [4], [], kv_idx=columns(1000))
    assert found.tolist() == [i * 104729 % 97 for i in range(1000)]
