"""Every operation's value on torch tensors, and the meaning of captured reads."""

from __future__ import annotations

import math
import multiprocessing
import os

import pytest
import torch

from anyflex.mod_graph.evaluate import TORCH, Evaluator, bounded_index, evaluate
from anyflex.mod_graph.graph_builder import GraphBuilder
from anyflex.mod_graph.operations import OPERATIONS

INT, FLOAT, BOOL = torch.int64, torch.float64, torch.bool


def evaluated(operation, operands, dtype, attribute=None, captured=()):
    """Evaluate one node on tensors given as inputs x0, x1, ..."""
    builder = GraphBuilder()
    arguments = tuple(
        builder.add("input", operand.dtype, (), f"x{i}") for i, operand in enumerate(operands)
    )
    position = builder.add(operation, dtype, arguments, attribute)
    inputs = {f"x{i}": operand for i, operand in enumerate(operands)}
    (value,) = evaluate(
        builder.nodes, [position], inputs=inputs, captured=captured, ints=(), floats=()
    )
    assert value.dtype == dtype
    return value


# Python's own arithmetic is the oracle wherever Python defines the operation.
PYTHON_INTS = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "floordiv": lambda x, y: x // y,
    "mod": lambda x, y: x % y,
    "fmod": lambda x, y: int(math.fmod(x, y)),
    "minimum": min,
    "maximum": max,
    "neg": lambda x: -x,
    "abs": abs,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x: ~x,
    "sign": lambda x: (x > 0) - (x < 0),
}
PYTHON_COMPARISONS = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}
PYTHON_FLOATS = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "truediv": lambda x, y: x / y,
    "floordiv": lambda x, y: x // y,
    "mod": lambda x, y: x % y,
    "fmod": math.fmod,
    "atan2": math.atan2,
    "minimum": min,
    "maximum": max,
    "neg": lambda x: -x,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
    "trunc": math.trunc,
    "sign": lambda x: (x > 0) - (x < 0),
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "expm1": math.expm1,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "atan": math.atan,
    "sinh": math.sinh,
    "cosh": math.cosh,
    "tanh": math.tanh,
    "asinh": math.asinh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "erf": math.erf,
    "erfc": math.erfc,
}
PYTHON_POSITIVE = {
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "log1p": math.log1p,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
}
PYTHON_UNIT = {"asin": math.asin, "acos": math.acos, "atanh": math.atanh}

INTS = [-7, -4, -1, 0, 1, 2, 3, 5, 8]
FLOATS = [-3.5, -2.5, -1.25, -0.5, -0.1, 0.0, 0.3, 0.5, 1.0, 1.5, 2.5, 4.0]


def compared(operation, python, values, dtype, result):
    arity = OPERATIONS[operation]
    if arity == 1:
        operands = (torch.tensor(values, dtype=dtype),)
        expected = [python(x) for x in values]
    else:
        divides = operation in ("truediv", "floordiv", "mod", "fmod")
        pairs = [(x, y) for x in values for y in values if y != 0 or not divides]
        operands = tuple(torch.tensor(side, dtype=dtype) for side in zip(*pairs, strict=True))
        expected = [python(x, y) for x, y in pairs]
    got = evaluated(operation, operands, result)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=result), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("operation", sorted(PYTHON_INTS))
def test_integer_operations_mean_what_python_means(operation):
    compared(operation, PYTHON_INTS[operation], INTS, INT, INT)


@pytest.mark.parametrize("operation", sorted(PYTHON_COMPARISONS))
@pytest.mark.parametrize("dtype", [INT, FLOAT])
def test_comparisons_mean_what_python_means(operation, dtype):
    compared(operation, PYTHON_COMPARISONS[operation], INTS, dtype, BOOL)


@pytest.mark.parametrize("operation", sorted(PYTHON_FLOATS))
def test_float_operations_mean_what_python_means(operation):
    compared(operation, PYTHON_FLOATS[operation], FLOATS, FLOAT, FLOAT)


@pytest.mark.parametrize("operation", sorted(PYTHON_POSITIVE))
def test_functions_of_positive_numbers_mean_what_python_means(operation):
    compared(operation, PYTHON_POSITIVE[operation], [0.1, 0.5, 1.0, 7.0], FLOAT, FLOAT)


@pytest.mark.parametrize("operation", sorted(PYTHON_UNIT))
def test_functions_on_the_unit_interval_mean_what_python_means(operation):
    compared(operation, PYTHON_UNIT[operation], [-0.9, -0.1, 0.0, 0.7], FLOAT, FLOAT)


def test_acosh_and_pow_mean_what_python_means():
    compared("acosh", math.acosh, [1.0, 1.5, 9.0], FLOAT, FLOAT)
    compared("pow", lambda x, y: x**y, [0.5, 1.0, 2.0, 2.5], FLOAT, FLOAT)
    compared("pow", lambda x, y: x**y, [0, 1, 2, 3], INT, INT)


def test_bit_operations_on_bools_are_logic():
    x, y = torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])
    assert evaluated("and", (x, y), BOOL).tolist() == [True, False, False, False]
    assert evaluated("or", (x, y), BOOL).tolist() == [True, True, True, False]
    assert evaluated("xor", (x, y), BOOL).tolist() == [False, True, True, False]
    assert evaluated("not", (x,), BOOL).tolist() == [False, False, True, True]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_shift_outside_the_width_gives_0_or_the_sign(dtype):
    width = torch.iinfo(dtype).bits
    values = torch.tensor([5, -5, 5, -5, 5, -5], dtype=dtype)
    amounts = torch.tensor([-1, -1, width, width, 2, 2], dtype=dtype)
    assert evaluated("shl", (values, amounts), dtype).tolist() == [0, 0, 0, 0, 20, -20]
    assert evaluated("shr", (values, amounts), dtype).tolist() == [0, -1, 0, -1, 1, -2]


@pytest.mark.parametrize("operation", ["floordiv", "mod", "fmod"])
def test_integer_division_by_zero_spoils_only_its_own_pair(operation):
    x, y = torch.tensor([7, 7, -7]), torch.tensor([0, 2, 2])
    got = evaluated(operation, (x, y), INT)
    assert got[1:].tolist() == evaluated(operation, (x[1:], y[1:]), INT).tolist()


def divide_the_least_integers_by_minus_one():
    for dtype in (torch.int32, torch.int64):
        least, divisor = (torch.full((9,), n, dtype=dtype) for n in (torch.iinfo(dtype).min, -1))
        for operation in ("floordiv", "mod", "fmod"):
            evaluated(operation, (least, divisor), dtype)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_dividing_the_least_integer_by_minus_one_does_not_end_the_process():
    child = multiprocessing.get_context("fork").Process(
        target=divide_the_least_integers_by_minus_one
    )
    child.start()
    child.join(120)
    assert child.exitcode == 0


def test_nan_wins_in_minimum_and_maximum():
    x, y = torch.tensor([math.nan, 1.0]), torch.tensor([1.0, math.nan])
    assert evaluated("minimum", (x, y), torch.float32).isnan().all()
    assert evaluated("maximum", (x, y), torch.float32).isnan().all()


def test_where_and_casts():
    condition, x, y = torch.tensor([True, False]), torch.tensor([1.9, -1.9]), torch.tensor([5, 6])
    y = y.float()
    assert evaluated("where", (condition, x, y), torch.float32).tolist() == [x[0].item(), 6.0]
    assert evaluated("cast", (x,), torch.int32).tolist() == [1, -1]
    assert evaluated("cast", (torch.tensor([0, 300, -1]),), torch.int8).tolist() == [0, 44, -1]
    assert evaluated("cast", (torch.tensor([0, 2]),), BOOL).tolist() == [False, True]


def test_detach_keeps_the_value_and_stops_autograd():
    x = torch.tensor([2.0], requires_grad=True)
    got = evaluated("detach", (x,), torch.float32)
    assert got.item() == 2.0 and not got.requires_grad


def test_numbers_and_constants_have_the_nodes_type():
    builder = GraphBuilder()
    positions = [
        builder.add("const", torch.float32, (), 1e39),
        builder.add("const", torch.uint8, (), -1),
        builder.add("const", torch.bool, (), True),
        builder.add("number", torch.int64, (), "i1"),
        builder.add("number", torch.bfloat16, (), "f0"),
        builder.add("const", torch.float64, (), math.nan),
    ]
    values = evaluate(
        builder.nodes, positions, inputs={}, captured=(), ints=(7, 2**40), floats=(0.5,)
    )
    assert [v.dtype for v in values] == [builder.nodes[p].dtype for p in positions]
    assert [v.item() for v in values[:5]] == [math.inf, 255, True, 2**40, 0.5]
    assert math.isnan(values[5].item())


def test_an_index_wraps_once_and_then_clamps():
    index = torch.tensor([-9, -5, -4, -1, 0, 3, 4, 99])
    bounded, outside = bounded_index(index, 4)
    assert bounded.tolist() == [0, 0, 0, 3, 0, 3, 3, 3]
    assert outside.tolist() == [True, True, False, False, False, False, True, True]
    assert bounded_index(torch.tensor([0, 3]), 4)[1] is None
    assert bounded_index(torch.tensor([-4, 3]), 4)[1] is None


def loaded(table, *indices, out_of_range=None):
    builder = GraphBuilder()
    arguments = tuple(builder.add("input", i.dtype, (), f"x{n}") for n, i in enumerate(indices))
    position = builder.add("load", table.dtype, arguments, 0)
    inputs = {f"x{n}": index for n, index in enumerate(indices)}
    return evaluate(
        builder.nodes,
        [position],
        inputs=inputs,
        captured=[table],
        ints=(),
        floats=(),
        out_of_range=out_of_range,
    )[0]


def test_a_load_keeps_the_broadcast_shape_of_its_indices():
    table = torch.arange(24).reshape(2, 3, 4)
    q, k = torch.arange(4).view(1, 1, 4, 1), torch.arange(3).view(1, 1, 1, 3)
    got = loaded(table, torch.tensor(1), k, q)
    assert got.shape == (1, 1, 4, 3)
    assert torch.equal(got[0, 0], table[1].t())
    assert loaded(torch.tensor(3.0)).shape == ()


def test_narrow_and_mixed_index_types_load():
    table = torch.arange(16.0).reshape(4, 4)
    got = loaded(table, torch.tensor([1, -1], dtype=torch.int16), torch.tensor([0, 2]))
    assert got.tolist() == [4.0, 14.0]


def test_reads_outside_are_recorded_only_where_they_happen():
    table = torch.arange(4.0)
    record = []
    loaded(table, torch.tensor([-4, 3]), out_of_range=record)
    assert record == []
    got = loaded(table, torch.tensor([-5, 1, 4]), out_of_range=record)
    assert got.tolist() == [0.0, 1.0, 3.0]
    assert [(p, o.tolist()) for p, o in record] == [(0, [True, False, True])]


def test_an_empty_captured_tensor_reads_as_zero_everywhere_outside():
    record = []
    got = loaded(torch.empty(0), torch.tensor([0, 1]), out_of_range=record)
    assert got.tolist() == [0.0, 0.0]
    assert record[0][1].all()


def test_strided_and_expanded_tables_are_read_in_place():
    base = torch.arange(12.0).reshape(3, 4)
    assert loaded(base.t(), torch.tensor([3]), torch.tensor([1])).tolist() == [7.0]
    assert loaded(base[:1].expand(5, 4), torch.tensor([4]), torch.tensor([2])).tolist() == [2.0]


def test_an_evaluator_skips_what_is_not_wanted():
    builder = GraphBuilder()
    x = builder.add("input", FLOAT, (), "score")
    builder.add("load", FLOAT, (), 99)
    wanted = builder.add("add", FLOAT, (x, x))
    (value,) = Evaluator(builder.nodes, [wanted])(
        {"score": torch.ones((), dtype=FLOAT)}, (), (), ()
    )
    assert value.item() == 2.0


def test_these_tests_cover_every_operation():
    tested = {*PYTHON_INTS, *PYTHON_COMPARISONS, *PYTHON_FLOATS, *PYTHON_POSITIVE, *PYTHON_UNIT}
    tested |= {
        "input",
        "number",
        "const",
        "acosh",
        "pow",
        "shl",
        "shr",
        "where",
        "cast",
        "load",
        "detach",
    }
    assert tested == set(OPERATIONS)
    assert TORCH.problems() == []
