"""Block graphs prove what they say of a box, and say what is true of the usual masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anyflex.mod_graph.block_graph import block_graph
from anyflex.mod_graph.evaluate import evaluate
from anyflex.mod_graph.graph import ModGraph, parse_graph
from anyflex.mod_graph.graph_builder import GraphBuilder
from anyflex.mod_graph.operations import RECORDS
from anyflex.mod_graph.simplify import simplify
from anyflex.tracing.trace import trace_mod
from tests.block_masks.families import FAMILIES, Sizes, Source, mask_mods, sizes
from tests.block_masks.test_random_masks import CHECKED, dense
from tests.intervals.expressions import DOMAIN, Expression, Operands
from tests.masks import CASES
from tests.mod_graph.boxes import Judged, judge_graph, judge_mask
from tests.soak import SOAK

__all__: list[str] = []

INT, BOOL = torch.int64, torch.bool
INF, NAN = float("inf"), float("nan")

OPEN_BLOCKS = {
    "document_offsets_with_an_inner_mask": 0.2,
    "documents_in_any_order": 0.9,
    "documents_or_sinks": 0.06,
    "global_and_window": 0.1,
    "neighbourhood_3d": 0.15,
    "shared_prefixes_of_groups": 0.05,
    "tree": 1,
    "tree_after_a_prefix": 0.2,
}
"""Largest share of the blocks that stay open without need, of masks that have any."""
RANGES_SETTLE = (
    "block_causal", "causal", "chunked", "dilated", "neighbourhood_1d", "padding", "prefix_lm",
    "sliding_window",
)  # fmt: skip
"""Masks of which no box stays open without need, wherever it lies; their cases begin so."""
OTHER_MASKS = ("neighbourhood_1d_dilated", "neighbourhood_1d_causal")


@pytest.mark.parametrize("name", CASES)
def test_blocks_of_ready_made_masks_are_settled(name: str) -> None:
    made = CASES[name].make(53)
    live = made.dense()
    blocks = judge_mask(made.mask_mod, live, aligned=True)
    boxes = judge_mask(made.mask_mod, live, aligned=False)
    assert blocks.settled > 30 and boxes.settled > 30
    assert blocks.share <= OPEN_BLOCKS.get(name, 0)
    if name.startswith(RANGES_SETTLE) and name not in OTHER_MASKS:
        assert boxes.open == 0


@pytest.mark.parametrize("name", FAMILIES)
@settings(CHECKED, max_examples=100 if SOAK else 3)
@given(data=st.data())
def test_what_is_said_of_a_family_of_masks_is_true(name: str, data: st.DataObject) -> None:
    of = small(data)
    check(FAMILIES[name](Source(data.draw, of)), of)


@settings(CHECKED, max_examples=3000 if SOAK else 30)
@given(data=st.data())
def test_what_is_said_of_combined_masks_is_true(data: st.DataObject) -> None:
    of = small(data)
    check(data.draw(mask_mods(of)), of)


def small(data: st.DataObject) -> Sizes:
    of = data.draw(sizes())
    return Sizes(of.batch, of.heads, min(of.q, 150), min(of.kv, 150), of.block)


def check(mask_mod: Callable[..., Any], of: Sizes) -> None:
    live = dense(mask_mod, of)
    for aligned in (True, False):
        judge_mask(mask_mod, live, aligned=aligned, block=16)


def live_of(expression: Expression) -> Tensor:
    """Values of a bool expression, [B, H, Q, KV] of `DOMAIN`."""
    (q, kv) = DOMAIN.lengths
    inputs = {
        "b": torch.arange(DOMAIN.batch).view(-1, 1, 1, 1),
        "h": torch.arange(DOMAIN.heads).view(-1, 1, 1),
        "q_idx": torch.arange(q).view(-1, 1),
        "kv_idx": torch.arange(kv),
    }
    (value,) = evaluate(
        expression.graph.nodes, (expression.graph.output,), inputs=inputs,
        captured=expression.captured, ints=(), floats=(),
    )  # fmt: skip
    return value.expand(DOMAIN.batch, DOMAIN.heads, q, kv)


def judge(make: Operands, operation: str, arguments: tuple[int, ...]) -> Judged:
    """Judge a bool operation."""
    expression = make.expression(operation, BOOL, arguments)
    return judge_graph(
        simplify(expression.graph), live_of(expression), captured=expression.captured
    )


def operand(make: Operands, dtype: torch.dtype) -> int:
    if dtype is BOOL:
        return make.boolean()
    if dtype.is_floating_point:
        return make.floating(dtype)
    number = make.integer()
    return number if dtype is INT else make.builder.add("cast", dtype, (number,))


def constant(make: Operands, dtype: torch.dtype) -> int:
    value = make.random.choice((-5, -1, 0, 1, 2, 3, 7))
    held = float(value) if dtype.is_floating_point else value % 8
    return make.builder.add("const", dtype, (), bool(value > 0) if dtype is BOOL else held)


KINDS = {
    "bool": (BOOL,),
    "int": (INT, torch.int32, torch.int8, torch.uint8),
    "float": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
}
OPERATIONS = [
    (name, kind)
    for name, record in RECORDS.items()
    for kind in record.types
    if record.operands and name not in ("where", "cast")
]
ORDER = ("eq", "ne", "lt", "le", "gt", "ge")
INEXACT = {(record.name, "float") for record in RECORDS.values() if record.approximate}
WITHOUT_A_RULE = {
    *INEXACT,
    ("sqrt", "float"),
    ("floordiv", "float"),
    ("mod", "float"),
    ("fmod", "float"),
    ("pow", "int"),
}
"""Operations on values that move with the query or the key of which nothing is said."""


@pytest.mark.parametrize(("operation", "kind"), OPERATIONS)
def test_what_is_said_of_an_operation_is_true(operation: str, kind: str) -> None:
    said = 0
    for seed in range(60 if SOAK else 6):
        make = Operands(seed)
        dtype = KINDS[kind][seed % len(KINDS[kind])]
        arguments = [operand(make, dtype) for _ in range(RECORDS[operation].operands or 0)]
        if len(arguments) == 2 and seed % 3:
            arguments[seed % 2] = constant(make, dtype)
        if operation in ORDER or dtype is BOOL:
            judged = judge(make, operation, tuple(arguments))
        else:
            value = make.builder.add(operation, dtype, tuple(arguments))
            bound = constant(make, dtype) if seed % 2 else operand(make, dtype)
            judged = judge(make, make.random.choice(("lt", "ge", "eq", "ne")), (value, bound))
        said += judged.settled - judged.open
    assert said > 0 or (operation, kind) in WITHOUT_A_RULE


@pytest.mark.parametrize(("operation", "kind"), OPERATIONS)
def test_an_operation_without_a_rule_is_named_here(operation: str, kind: str) -> None:
    make = Operands(1)
    q = make.builder.add("input", INT, (), "q_idx")
    dtype = KINDS[kind][0]
    some = make.builder.add("ge", BOOL, (q, make.builder.add("const", INT, (), 0)))
    value = some if dtype is BOOL else make.builder.add("cast", dtype, (q,))
    held = make.builder.add("const", dtype, (), 3.0 if dtype.is_floating_point else 3)
    arguments = (value, some if dtype is BOOL else held)[: RECORDS[operation].operands]
    result = make.builder.add(operation, dtype, arguments)
    if operation in ORDER or dtype is BOOL:
        blocks = block_graph(make.expression(operation, BOOL, arguments).graph).graph
    else:
        blocks = block_graph(make.expression("lt", BOOL, (result, held)).graph).graph
    open_ = blocks.nodes[blocks.output].operation == "const"
    assert open_ == ((operation, kind) in WITHOUT_A_RULE)


@pytest.mark.parametrize("depth", [1, 2, 3, 5] if SOAK else [1, 3])
def test_what_follows_integers_that_wrap_sees_them_wrapped(depth: int) -> None:
    said = 0
    for seed in range(200 if SOAK else 20):
        make = Operands(seed)
        arguments = tuple(make.wrapping(depth) for _ in range(2))
        judged = judge(make, make.random.choice(("eq", "ne", "lt", "ge")), arguments)
        said += judged.settled - judged.open
    assert said > (300 if SOAK else 100)


def nested(make: Operands, dtype: torch.dtype, depth: int) -> int:
    """A value of any operations on values of any types."""
    draw = make.random
    if depth == 0:
        return constant(make, dtype) if draw.random() < 0.2 else operand(make, dtype)
    choice = draw.random()
    if choice < 0.15:
        condition = nested(make, BOOL, depth - 1)
        sides = (nested(make, dtype, depth - 1), nested(make, dtype, depth - 1))
        return make.builder.add("where", dtype, (condition, *sides))
    types = [dtype for dtypes in KINDS.values() for dtype in dtypes]
    if choice < 0.3:
        # A conversion of a float that an integer type doesn't hold has no defined result.
        source = draw.choice(types)
        if dtype is BOOL or dtype.is_floating_point or not source.is_floating_point:
            return make.builder.add("cast", dtype, (nested(make, source, depth - 1),))
    source = draw.choice(types) if dtype is BOOL and choice < 0.7 else dtype
    class_ = "bool" if source is BOOL else "float" if source.is_floating_point else "int"
    name = draw.choice(
        [
            name
            for name, kind in OPERATIONS
            if kind == class_
            and (name, kind) not in INEXACT
            and (source is BOOL or (name in ORDER) == (dtype is BOOL))
        ]
    )
    arguments = [nested(make, source, depth - 1) for _ in range(RECORDS[name].operands or 0)]
    return make.builder.add(name, dtype, tuple(arguments))


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_what_is_said_of_random_graphs_is_true(depth: int) -> None:
    said = 0
    for seed in range(2000 if SOAK else 12):
        make = Operands(seed)
        judged = judge(make, "not", (nested(make, BOOL, depth),))
        said += judged.settled - judged.open
    assert said > (600 if SOAK else 200)


SPECIAL = (NAN, -INF, 0.0, -7.5, *((INF, -0.0, 3.0e38) if SOAK else ()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "truediv", "minimum", "maximum"])
def test_floats_that_are_not_finite_are_followed_or_left_open(
    operation: str, dtype: torch.dtype
) -> None:
    table = torch.randn(100, generator=torch.Generator().manual_seed(1)).to(dtype)
    table[10::20] = NAN
    table[17::20] = INF
    table[30::33] = -INF
    for seed, special in enumerate(SPECIAL):
        make = Operands(seed)
        make.captured += [table, table.flip(0).nan_to_num(1, INF, -INF)]
        q, kv = (make.builder.add("input", INT, (), name) for name in ("q_idx", "kv_idx"))
        reads = [make.builder.add("load", dtype, (q,), captured) for captured in (0, 1)]
        other = make.builder.add("load", dtype, (kv,), 1)
        number = make.builder.add("const", dtype, (), special)
        ends = [make.builder.add("const", dtype, (), end) for end in (INF, -INF)]
        for read in reads:
            for second in (number, other):
                value = make.builder.add(operation, dtype, (read, second))
                judge(make, "le", (value, ends[0]))
                judge(make, "ge", (value, ends[1]))
                judge(make, make.random.choice(("lt", "eq", "ne")), (value, number))
        judge(make, "cast", (make.builder.add("cast", torch.int32, (value,)),))


def test_the_sign_of_nan_is_followed_or_left_open() -> None:
    values = torch.arange(-40.0, 40.0)
    values[::9] = NAN
    nan = torch.tensor(NAN)

    def read(b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.sign(values[k]) == 0

    def selected(b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.sign(torch.where(k % 9 < q % 5, nan, k - 40.0)) == 0

    of = Sizes(1, 1, 60, 80, (16, 16))
    for mask in (read, selected):
        for aligned in (True, False):
            judge_mask(mask, dense(mask, of), aligned=aligned)


FAR = [0, 1, -1, 7, -7, 1 << 31, -(1 << 31) - 1, 1 << 32, (1 << 63) - 1, -(1 << 63)]


@pytest.mark.parametrize("operation", ["add", "sub", "mul", "floordiv", "mod", "fmod"])
@pytest.mark.parametrize("swapped", [False, True])
def test_numbers_that_make_int64_wrap_leave_boxes_open(operation: str, swapped: bool) -> None:
    builder = GraphBuilder()
    q, number = builder.add("input", INT, (), "q_idx"), builder.add("number", INT, (), "i0")
    if swapped and operation in ("floordiv", "mod", "fmod"):
        # The reference gives what a division by 0 is elsewhere.
        q = builder.add("add", INT, (q, builder.add("const", INT, (), 1)))
    value = builder.add(operation, INT, (number, q) if swapped else (q, number))
    value = builder.add("sub", INT, (value, builder.add("input", INT, (), "kv_idx")))
    limit = builder.add("number", INT, (), "i1")
    graph = ModGraph(tuple(builder.nodes), 0)
    said = 0
    for far in FAR:
        for bound in (5, far):
            output = builder.add("ge", BOOL, (value, limit))
            graph = ModGraph(tuple(builder.nodes), output)
            live = evaluated(graph, (far, bound))
            judged = judge_graph(simplify(graph), live, ints=(far, bound))
            if far == 0 and operation in ("floordiv", "mod", "fmod") and not swapped:
                assert judged.open == judged.settled
            said += judged.settled - judged.open
    assert said > 300


def evaluated(graph: ModGraph, ints: tuple[int, ...]) -> Tensor:
    inputs = {"q_idx": torch.arange(96).view(-1, 1), "kv_idx": torch.arange(80)}
    (live,) = evaluate(
        graph.nodes, (graph.output,), inputs=inputs, captured=(), ints=ints, floats=()
    )
    return live.expand(1, 1, 96, 80)


def test_reads_before_the_first_key_count_from_the_end() -> None:
    limits = torch.arange(40) * 2
    wrapped = limits[torch.arange(-20, 30)]
    live = torch.arange(60) < wrapped[:, None]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k < limits[q]

    for aligned in (True, False):
        judged = judge_mask(mask, live[None, None], aligned=aligned, first=-20)
        assert 0 < judged.open < judged.settled
    of_one = judge_mask(mask, live[None, None], aligned=True, first=-20, block=1)
    assert of_one.open == 0


def test_reads_past_the_end_are_those_of_the_last_element() -> None:
    limits = torch.tensor([3, 9, 20, 5, 11])
    live = torch.arange(30) < limits[torch.arange(24).clamp(max=4)][:, None]
    for block in (4, 8):
        judged = judge_mask(
            lambda b, h, q, k: k < limits[q], live[None, None], aligned=True, block=block
        )
        assert judged.open < judged.settled


def test_a_read_at_an_index_that_may_have_wrapped_is_left_open() -> None:
    limits, flags = torch.arange(50), torch.arange(50) < 30

    def wrapping(q: Any) -> Any:
        return ((q.to(torch.int8) + 100) % 50).long()

    for mask in (
        lambda b, h, q, k: k < limits[wrapping(q)],
        lambda b, h, q, k: flags[wrapping(q)],
        lambda b, h, q, k: ~flags[wrapping(q)],
    ):
        live = dense(mask, Sizes(1, 1, 90, 60, (16, 16)))
        for aligned in (True, False):
            judged = judge_mask(mask, live, aligned=aligned)
            assert 0 < judged.open < judged.settled


def test_a_box_of_one_row_reads_the_element_itself() -> None:
    limits = torch.randperm(43, generator=torch.Generator().manual_seed(1))
    mask = simplify(parse_graph(trace_mod(lambda b, h, q, k: k < limits[q], "mask").text))
    blocks = block_graph(mask)
    row = torch.arange(-43, 43)
    inputs = {
        "q_low": row, "q_high": row, "kv_low": torch.tensor(10), "kv_high": torch.tensor(20),
        "q_block": torch.tensor(8),
    }  # fmt: skip
    (kinds,) = evaluate(
        blocks.graph.nodes, (blocks.graph.output,), inputs=inputs,
        captured=blocks.tensors([limits], 8, 8), ints=(), floats=(),
    )  # fmt: skip
    limit = limits[row]
    assert torch.equal(kinds, torch.where(limit <= 10, 0, torch.where(limit > 20, 1, 2)).int())


def test_a_box_of_more_than_two_entries_of_a_range_table_is_left_open() -> None:
    limits = torch.arange(64)
    live = torch.arange(64) < limits[:, None]
    mask = simplify(parse_graph(trace_mod(lambda b, h, q, k: k < limits[q], "mask").text))
    blocks = block_graph(mask)
    inputs = {
        "q_low": torch.tensor([0, 3, 5, 8]), "q_high": torch.tensor([15, 18, 23, 31]),
        "kv_low": torch.tensor(40), "kv_high": torch.tensor(50), "q_block": torch.tensor(8),
    }  # fmt: skip
    (kinds,) = evaluate(
        blocks.graph.nodes, (blocks.graph.output,), inputs=inputs,
        captured=blocks.tensors([limits], 8, 8), ints=(), floats=(),
    )  # fmt: skip
    assert not live[:32, 40:51].any()
    assert kinds.tolist() == [0, 2, 2, 2]


def test_a_captured_tensor_without_elements_reads_as_zeros() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    live = (torch.arange(20) <= 0).expand(1, 1, 30, 20)
    for aligned in (True, False):
        judged = judge_mask(lambda b, h, q, k: k <= empty[q], live, aligned=aligned)
        assert judged.open == 0


def test_tables_that_decide_nothing_are_left_out() -> None:
    table = torch.arange(8)
    blocks = block_graph(
        simplify(parse_graph(trace_mod(lambda b, h, q, k: table[q].sin() < k, "mask").text))
    )
    assert blocks.tables == ()
    assert str(blocks.graph) == "return 2"


def test_functions_that_targets_round_unlike_are_left_open() -> None:
    # Even of a head alone: a kernel's mask may get other last bits than its list of blocks.
    table = torch.rand(4)
    for mask in (
        lambda b, h, q, k: q - k < table[h].exp(),
        lambda b, h, q, k: table[h].exp() < 1.5,
    ):
        graph = block_graph(simplify(parse_graph(trace_mod(mask, "mask").text))).graph
        assert str(graph) == "return 2"


def test_what_only_the_head_and_the_batch_entry_decide_is_never_left_open() -> None:
    widths = torch.tensor([[1.5, 20.0], [7.0, 300.0]])

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (widths[b, h] * 3 > 21) & (q - k < (1 << (h + 2 * b)) * 3)

    live = dense(mask, Sizes(2, 2, 60, 70, (16, 16)))
    for aligned in (True, False):
        assert judge_mask(mask, live, aligned=aligned).open == 0
