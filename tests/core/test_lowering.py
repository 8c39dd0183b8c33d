"""Lowering tables: rules by operation and type, text and functions, completeness."""

from __future__ import annotations

import pytest
import torch

from anyflex.mod_graph.evaluate import TORCH
from anyflex.mod_graph.graph_builder import GraphBuilder
from anyflex.mod_graph.lowering import Lowering, operand_classes
from anyflex.mod_graph.operations import OPERATIONS

TYPES = {torch.float32: "float", torch.int64: "long", torch.bool: "bool"}


def emit(lines, node, text):
    lines.append(text)
    return f"v{len(lines) - 1}"


def lowering(**rules):
    rules = {name.replace("__", ":"): rule for name, rule in rules.items()}
    return Lowering("test C", rules, emit, TYPES)


def test_text_rules_are_filled_in_node_order():
    builder = GraphBuilder()
    q = builder.add("input", torch.int64, (), "q_idx")
    two = builder.add("const", torch.int64, (), 2)
    remainder = builder.add("mod", torch.int64, (q, two))
    as_float = builder.add("cast", torch.float32, (remainder,))
    builder.add("neg", torch.int64, (q,))
    target = lowering(
        input="{attribute}",
        const="({type}){attribute}",
        mod__int="imod({0}, {1})",
        mod__float="fmodf({0}, {1})",
        cast__int="({type}){0}",
        cast="never",
    )
    lines = []
    values = target.lower(builder.nodes, lines, [as_float])
    assert lines == ["q_idx", "(long)2", "imod(v0, v1)", "(float)v2"]
    assert values[as_float] == "v3"


def test_a_function_rule_gets_context_node_and_operands():
    def load(lines, node, operands):
        return emit(lines, node, f"captured{node.attribute}[{' + '.join(operands)}]")

    builder = GraphBuilder()
    h = builder.add("input", torch.int64, (), "h")
    read = builder.add("load", torch.float32, (h, h), 3)
    lines = []
    lowering(input="{attribute}", load=load).lower(builder.nodes, lines, [read])
    assert lines == ["h", "captured3[v0 + v0]"]


def test_a_comparison_is_typed_by_its_operands_and_a_where_by_its_result():
    builder = GraphBuilder()
    x = builder.add("input", torch.float32, (), "score")
    less = builder.add("lt", torch.bool, (x, x))
    chosen = builder.add("where", torch.float32, (less, x, x))
    target = lowering(input="{attribute}", lt__float="lt", where__float="w", where__bool="never")
    assert target.rule(builder.nodes, builder.nodes[less]) == "lt"
    assert target.rule(builder.nodes, builder.nodes[chosen]) == "w"


def test_missing_names_what_a_table_lacks_by_type():
    full = dict.fromkeys(OPERATIONS, "x")
    assert Lowering("full", full, emit).missing() == []
    partial = dict(full)
    del partial["add"], partial["exp"]
    partial["add:int"] = "x"
    target = Lowering("partial", partial, emit)
    assert sorted(target.missing()) == ["add:float", "exp:float"]
    partial |= {"not:float": "x", "expp": "x"}
    assert sorted(Lowering("partial", partial, emit).problems()) == [
        "the partial table has 'expp', which is no operation",
        "the partial table has 'not:float', but no float comes there",
        "the partial table has no rule for 'add:float'",
        "the partial table has no rule for 'exp:float'",
    ]
    assert target.operations() == frozenset(OPERATIONS) - {"add", "exp"}
    with pytest.raises(KeyError, match="partial has no rule for exp of "):
        builder = GraphBuilder()
        x = builder.add("input", torch.float32, (), "score")
        builder.add("exp", torch.float32, (x,))
        target.rule(builder.nodes, builder.nodes[1])


def test_a_type_that_the_table_has_no_name_for_is_an_error_where_a_rule_asks_for_it():
    builder = GraphBuilder()
    x = builder.add("input", torch.float32, (), "score")
    half = builder.add("cast", torch.float16, (x,))
    with pytest.raises(KeyError, match=r"test C has no name for torch\.float16, of cast"):
        lowering(input="x", cast="{0}.to({type})").lower(builder.nodes, [], [half])
    lowering(input="x", cast="half({0})").lower(builder.nodes, [], [half])


def test_text_rules_need_an_emit_function():
    builder = GraphBuilder()
    x = builder.add("input", torch.float32, (), "score")
    with pytest.raises(TypeError, match="no emit function"):
        Lowering("bare", {"input": "x"}).lower(builder.nodes, None, [x])


def test_every_operation_has_classes_and_the_torch_table_is_complete():
    assert all(operand_classes(name) for name in OPERATIONS)
    assert TORCH.problems() == []
    assert TORCH.operations() == frozenset(OPERATIONS)
