"""Claims of the analysis about a cell hold for every element in it, for every operation."""

from __future__ import annotations

import itertools

import pytest
import torch

from anyflex.intervals.analysis import Analysis
from anyflex.intervals.floats import FLOAT_RULES
from anyflex.intervals.integers import INTEGER_RULES
from anyflex.intervals.three_valued_logic import BOOL_RULES
from anyflex.mod_graph.operations import RECORDS
from anyflex.mod_graph.operations.functions import FUNCTIONS
from tests.intervals.expressions import DOMAIN, Expression, Operands, cells_of, values_in
from tests.soak import SOAK

__all__: list[str] = []

SEEDS = range(12 if SOAK else 4)
INT, BOOL = torch.int64, torch.bool
UNARY = {name for name, record in RECORDS.items() if record.operands == 1}


def check(expression: Expression, seed: int) -> int:
    """Check every node in random cells; return how many claims were made of the last one."""
    analysis = Analysis(expression.graph, expression.captured, DOMAIN)
    cells = cells_of(seed)
    evaluation = analysis.evaluation(cells)
    claims = 0
    for position, node in enumerate(expression.graph.nodes):
        last = position == expression.graph.output
        if node.dtype is BOOL:
            flags = [
                torch.as_tensor(flag).expand(cells.count) for flag in evaluation.verdict(position)
            ]
            for cell in range(cells.count):
                true, false, mixed = (bool(flag[cell]) for flag in flags)
                assert true + false <= 1
                values = values_in(expression, position, cells, cell)
                assert not true or bool(values.all())
                assert not false or not bool(values.any())
                some, every = values.any(3).any(1), values.all(3).all(1)
                assert not mixed or bool((some & ~every).all())
                claims += last and (true or false or mixed)
            continue
        found = evaluation.range(position)
        if found is None:
            continue
        whole = analysis.ranges[position]
        low, high, attained = (torch.as_tensor(f).expand(cells.count) for f in found)
        for cell in range(cells.count):
            least, most = low[cell], high[cell]
            if least.is_floating_point() and bool(least.isnan()):
                assert bool(most.isnan())  # nothing is claimed
                continue
            values = values_in(expression, position, cells, cell)
            assert bool((values >= least).all()) and bool((values <= most).all()), (node, cell)
            claims += last
            if whole is not None:
                assert whole.low <= int(least) and int(most) <= whole.high
            if bool(attained[cell]) and not node.dtype.is_floating_point:
                blocks = values.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
                wanted = set(range(int(least), int(most) + 1))
                assert all(set(block.tolist()) == wanted for block in blocks)
    return int(claims)


@pytest.mark.parametrize("operation", sorted(INTEGER_RULES))
def test_ranges_of_integers_hold_all_values_and_attained_ones_all_are(operation: str) -> None:
    claims = 0
    for seed in SEEDS:
        make = Operands(seed)
        if operation == "cast":
            argument = make.boolean() if seed % 2 else make.floating(torch.float32)
            arguments: tuple[int, ...] = (argument,)
        elif operation == "where":
            arguments = (make.boolean(), make.integer(), make.integer())
        elif operation in UNARY:
            arguments = (make.integer(),)
        elif operation in ("shl", "shr", "pow"):
            arguments = (make.integer(), make.constant(0, 3))
        elif operation in ("floordiv", "mod", "fmod") and seed % 3:
            arguments = (make.integer(), make.constant(1, 12))
        else:
            arguments = (make.integer(), make.integer())
        claims += check(make.expression(operation, INT, arguments), seed)
    assert claims > 24 * len(SEEDS) // 4, "nearly nothing was claimed"


@pytest.mark.parametrize("depth", [1, 2, 3, 5] if SOAK else [1, 3])
def test_what_follows_integers_that_wrap_sees_them_wrapped(depth: int) -> None:
    claims = 0
    seeds = range(40 if SOAK else 10)
    for seed in seeds:
        make = Operands(seed)
        arguments = tuple(make.wrapping(depth) for _ in range(2))
        operation = make.random.choice(("eq", "ne", "lt", "ge"))
        claims += check(make.expression(operation, BOOL, arguments), seed)
    assert claims > 24 * len(seeds) // 8, "nearly nothing was claimed"


FLOATS = list(
    itertools.product(
        sorted(FLOAT_RULES), [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    )
)


@pytest.mark.parametrize(("operation", "dtype"), FLOATS[:: 1 if SOAK else 3])
def test_ranges_of_floats_hold_all_values(operation: str, dtype: torch.dtype) -> None:
    claims = 0
    for seed in SEEDS:
        make = Operands(seed)
        if operation == "cast":
            source = make.integer() if seed % 2 else make.boolean()
            arguments: tuple[int, ...] = (source,)
        elif operation == "where":
            arguments = (make.boolean(), make.floating(dtype), make.floating(dtype))
        elif operation in UNARY:
            arguments = (make.floating(dtype),)
        elif operation == "pow":
            arguments = (make.floating(dtype), make.builder.add("const", dtype, (), 2.0))
        else:
            arguments = (make.floating(dtype), make.floating(dtype))
        claims += check(make.expression(operation, dtype, arguments), seed)
    assert claims > 0


LOGIC = {"not", "and", "or", "xor", "where", "detach"}
ON_BOOLS = [(operation, "bool") for operation in sorted(BOOL_RULES)]
ON_NUMBERS = [(o, kind) for o in sorted(set(BOOL_RULES) - LOGIC) for kind in ("int", "float")]


@pytest.mark.parametrize(("operation", "kind"), ON_BOOLS + ON_NUMBERS)
def test_verdicts_hold_for_every_element(operation: str, kind: str) -> None:
    claims = 0
    for seed in range(30 if SOAK else 4):
        make = Operands(seed)
        operand = {
            "bool": make.boolean, "int": make.integer,
            "float": lambda make=make: make.floating(torch.float32),
        }[kind]  # fmt: skip
        count = 3 if operation == "where" else 1 if operation in ("not", "cast", "detach") else 2
        arguments = tuple(operand() for _ in range(count))
        claims += check(make.expression(operation, BOOL, arguments), seed)
    assert claims > 0


def test_an_operation_without_a_rule_leaves_its_cells_open() -> None:
    for operation in sorted({record.name for record in FUNCTIONS} - set(FLOAT_RULES)):
        make = Operands(1)
        q = make.builder.add("input", INT, (), "q_idx")
        argument = make.builder.add("cast", torch.float32, (q,))
        expression = make.expression(operation, torch.float32, (argument,))
        analysis = Analysis(expression.graph, expression.captured, DOMAIN)
        evaluation = analysis.evaluation(cells_of(1))
        assert evaluation.range(expression.graph.output) is None
    assert set(INTEGER_RULES) | set(FLOAT_RULES) | set(BOOL_RULES) <= set(RECORDS)
