"""Mods as source text, run on stand-ins of CuTe's scalars."""

from __future__ import annotations

import pytest
import torch
from anyflex_flash4.cute_mods import CuteMods
from anyflex_flash4.mods import FLASH4, call_numbers, load_source, reads_call, write_source
from stand_in import Lanes, Number, Table, install

from anyflex.plugin import (
    DTYPES,
    OPERATIONS,
    Call,
    CapturedFacts,
    ModGraph,
    Node,
    Spec,
    evaluate,
    operand_classes,
    parse_graph,
)

FLOATS = [0.0, -0.0, 0.5, -0.5, 1.0, -1.5, 2.5, 3.0, -7.25, 88.0, torch.inf, -torch.inf, torch.nan]
INTEGERS = [0, 1, -1, 2, -3, 7, 31, -32, 63, 64, -65, 100]
NAMES = {dtype: name for name, dtype in DTYPES.items()}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
OPERAND_TYPES = {"bool": ("bool",), "int": ("i64", "i32", "i8"), "float": ("f32", "f64")}


def spec_of(score: ModGraph | None, mask: ModGraph | None = None, **more: object) -> Spec:
    return Spec(
        "cuda", "sm_90", torch.bfloat16, 64, 64, score_graph=score, mask_graph=mask, **more
    )


def pairs(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of interesting values of a type."""
    dtype = DTYPES[name]
    values = FLOATS if dtype.is_floating_point else INTEGERS
    tensor = torch.tensor([False, True] if name == "bool" else values).to(dtype)
    first, second = torch.meshgrid(tensor, tensor, indexing="ij")
    return first.flatten(), second.flatten()


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
def test_an_operation_has_torch_s_meaning(
    operation: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, count = DTYPES[name], OPERATIONS[operation]
    # Two captured tensors are the operands: no type is converted on the way.
    first, second = pairs(name)
    nodes = [Node("input", torch.int64, (), "q_idx")]
    nodes += [Node("load", dtype, (0,), 0), Node("load", dtype, (0,), 1)]
    arguments = (1, 2)[:count]
    if count == 3:
        nodes.append(Node("lt", torch.bool, (1, 2)))
        arguments = (3, 1, 2)
    result = torch.bool if operation in COMPARISONS else dtype
    nodes.append(Node(operation, result, arguments))
    nodes.append(Node("cast", torch.float64, (len(nodes) - 1,)))
    graph = ModGraph(tuple(nodes), len(nodes) - 1)
    place = torch.arange(len(first))
    (wanted,) = evaluate(
        nodes,
        [graph.output],
        inputs={"q_idx": place},
        captured=[first, second],
        ints=(),
        floats=(),
    )
    install(monkeypatch)
    facts = (CapturedFacts(dtype, 1, False),) * 2
    text = write_source(spec_of(graph, captured=facts))
    body = load_source(text)["score_mod"]
    ops = CuteMods(text, {}, (True, False), 2)._ops
    tables = [
        Table(each.view(torch.uint8) if dtype is torch.bool else each) for each in (first, second)
    ]
    index = Number.of[torch.int64](place)
    ints = Table(torch.tensor([len(first)] * 2, dtype=torch.int32))
    found = body(ops, tables, ints, None, None, index, index, index, index).value
    if operation == "pow" and not dtype.is_floating_point:
        # A negative exponent of 0: torch has no answer.
        keep = ~((first == 0) & (second < 0))
        found, wanted = found[keep], wanted[keep]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0, equal_nan=True)


def test_the_table_lacks_no_operation() -> None:
    assert FLASH4.problems() == []


def test_captured_tensors_are_read_within_bounds_and_numbers_come_from_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # table[kv_idx, h] * f0 + i0
    graph = parse_graph(
        "input i64 - kv_idx;input i64 - h;load f32 0,1 0;number f32 - f0;mul f32 2,3 -;"
        "number i64 - i0;cast f32 5 -;add f32 4,6 -;=7"
    )
    facts = (CapturedFacts(torch.float32, 2, False),)
    spec = spec_of(graph, captured=facts)
    table = torch.arange(6.0).view(3, 2)
    empty = torch.empty(0)
    call = Call(empty, empty, empty, None, (table,), (-(1 << 33) - 5,), (10.0,), 1.0)
    ints, floats = call_numbers(call)
    assert reads_call(spec) == (True, True)
    install(monkeypatch)
    text = write_source(spec)
    made = CuteMods(text, load_source(text), (True, True), 1)
    kv_idx = torch.tensor([-4, -1, 0, 2, 7], dtype=torch.int32)
    tensors = [
        Table(table.view(-1)),
        Table(torch.tensor(ints, dtype=torch.int32)),
        Table(torch.tensor(floats)),
    ]
    zero = Lanes([Number.of[torch.int32](0)])
    assert made.score_mod is not None
    found = made.score_mod(
        Lanes([Number.of[torch.float32](0.0)]),
        zero,
        Lanes([Number.of[torch.int32](1)]),
        q_idx=zero,
        kv_idx=Lanes([Number.of[torch.int32](kv_idx)]),
        seqlen_info=None,
        aux_tensors=tensors,
    )
    wanted = torch.tensor([10.0, 50.0, 10.0, 50.0, 50.0]) + float(-(1 << 33) - 5)
    assert found[0].value.tolist() == wanted.tolist()


def test_mods_that_differ_in_a_number_alone_have_different_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # FlashAttention-4 keeps what it has compiled by this name.
    install(monkeypatch)
    names = set()
    for number in ("2.0", "3.0"):
        graph = parse_graph(f"input f32 - score;const f32 - {number};mul f32 0,1 -;=2")
        text = write_source(spec_of(graph))
        made = CuteMods(text, load_source(text), (False, False), 0)
        names.add(made.score_mod.__cute_hash__)
    assert len(names) == 2


def test_a_slope_that_is_nan_passes_nothing_where_nothing_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # sqrt(score): at a dead pair what arrives is 0.
    graph = parse_graph("input f32 - score;sqrt f32 0 -;=1")
    install(monkeypatch)
    text = write_source(spec_of(graph, gradients=("q",)))
    made = CuteMods(text, load_source(text), (False, False), 0)
    zero = Lanes([Number.of[torch.int32](0)])
    found = made.score_mod_bwd(
        Lanes([Number.of[torch.float32]([0.0, 1.0])]),
        Lanes([Number.of[torch.float32]([-1.0, 4.0])]),
        zero,
        zero,
        q_idx=zero,
        kv_idx=zero,
        seqlen_info=None,
        aux_tensors=(),
    )
    assert found[0].value.tolist() == [0.0, 0.25]


def test_types_have_names() -> None:
    assert set(NAMES) == set(DTYPES.values())
