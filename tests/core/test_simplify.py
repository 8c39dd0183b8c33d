"""Simplifying changes no bit, removes what it should, keeps what looks removable and isn't."""

from __future__ import annotations

import math
import random

import pytest
import torch

from anyflex.mod_graph.evaluate import evaluate
from anyflex.mod_graph.graph import ModGraph
from anyflex.mod_graph.graph_builder import GraphBuilder
from anyflex.mod_graph.simplify import simplify, simplify_nodes

F32, F64, I32, I64, BOOL = torch.float32, torch.float64, torch.int32, torch.int64, torch.bool


def graph(build):
    builder = GraphBuilder()
    output = build(builder)
    return ModGraph(tuple(builder.nodes), output)


def score(b, dtype=F32):
    return b.add("input", dtype, (), "score")


def q_idx(b, dtype=I64):
    return b.add("input", dtype, (), "q_idx")


def truth(b):
    return b.add("ge", BOOL, (q_idx(b), b.add("input", I64, (), "kv_idx")))


def const(b, value, dtype):
    return b.add("const", dtype, (), value)


REMOVED = {
    "x * 1.0": lambda b: b.add("mul", F32, (score(b), const(b, 1.0, F32))),
    "1.0 * x": lambda b: b.add("mul", F32, (const(b, 1.0, F32), score(b))),
    "x / 1.0": lambda b: b.add("truediv", F32, (score(b), const(b, 1.0, F32))),
    "x - 0.0": lambda b: b.add("sub", F32, (score(b), const(b, 0.0, F32))),
    "x + -0.0": lambda b: b.add("add", F32, (score(b), const(b, -0.0, F32))),
    "x ** 1.0": lambda b: b.add("pow", F32, (score(b), const(b, 1.0, F32))),
    "-(-x)": lambda b: b.add("neg", F32, (b.add("neg", F32, (score(b),)),)),
    "x as f32": lambda b: b.add("cast", F32, (score(b),)),
    "x as f64 as f32": lambda b: b.add("cast", F32, (b.add("cast", F64, (score(b),)),)),
    "where(True, x, y)": lambda b: b.add(
        "where", F32, (const(b, True, BOOL), score(b), const(b, 2.0, F32))
    ),
    "where(c, x, x)": lambda b: b.add("where", F32, (truth(b), score(b), score(b))),
    "max(x, x)": lambda b: b.add("maximum", F32, (score(b), score(b))),
    "n + 0": lambda b: b.add("add", I64, (q_idx(b), const(b, 0, I64))),
    "0 + n": lambda b: b.add("add", I64, (const(b, 0, I64), q_idx(b))),
    "n // 1": lambda b: b.add("floordiv", I64, (q_idx(b), const(b, 1, I64))),
    "n & -1": lambda b: b.add("and", I64, (q_idx(b), const(b, -1, I64))),
    "n << 0": lambda b: b.add("shl", I64, (q_idx(b), const(b, 0, I64))),
    "~~n": lambda b: b.add("not", I64, (b.add("not", I64, (q_idx(b),)),)),
}


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_neutral_operations_go(name):
    assert [n.operation for n in simplify(graph(REMOVED[name])).nodes] == ["input"]


BOOLEAN = {
    "true & x": lambda b: b.add("and", BOOL, (const(b, True, BOOL), truth(b))),
    "x & true": lambda b: b.add("and", BOOL, (truth(b), const(b, True, BOOL))),
    "x | false": lambda b: b.add("or", BOOL, (truth(b), const(b, False, BOOL))),
    "x & x": lambda b: b.add("and", BOOL, (truth(b), truth(b))),
    "x ^ false": lambda b: b.add("xor", BOOL, (truth(b), const(b, False, BOOL))),
    "where(x, true, false)": lambda b: b.add(
        "where", BOOL, (truth(b), const(b, True, BOOL), const(b, False, BOOL))
    ),
    "x as int as bool": lambda b: b.add("cast", BOOL, (b.add("cast", I32, (truth(b),)),)),
}


@pytest.mark.parametrize("name", sorted(BOOLEAN))
def test_neutral_conditions_go(name):
    assert [n.operation for n in simplify(graph(BOOLEAN[name])).nodes] == ["input", "input", "ge"]


CONSTANT = {
    "n - n": (lambda b: b.add("sub", I64, (q_idx(b), q_idx(b))), 0),
    "n * 0": (lambda b: b.add("mul", I64, (q_idx(b), const(b, 0, I64))), 0),
    "n % 1": (lambda b: b.add("mod", I64, (q_idx(b), const(b, 1, I64))), 0),
    "n == n": (lambda b: b.add("eq", BOOL, (q_idx(b), q_idx(b))), True),
    "n < n": (lambda b: b.add("lt", BOOL, (q_idx(b), q_idx(b))), False),
    "x & false": (lambda b: b.add("and", BOOL, (truth(b), const(b, False, BOOL))), False),
    "x | true": (lambda b: b.add("or", BOOL, (truth(b), const(b, True, BOOL))), True),
    "-7 // 2": (lambda b: b.add("floordiv", I64, (const(b, -7, I64), const(b, 2, I64))), -4),
    "2.5 rounded": (lambda b: b.add("round", F32, (const(b, 2.5, F32),)), 2.0),
    "300 as i8": (
        lambda b: b.add("cast", torch.int8, (b.add("cast", I64, (const(b, 300, I32),)),)),
        44,
    ),
    "1 - 1.0f": (lambda b: b.add("sub", F32, (const(b, 1.0, F32), const(b, 1.0, F32))), 0.0),
}


@pytest.mark.parametrize("name", sorted(CONSTANT))
def test_what_is_constant_becomes_a_constant(name):
    build, value = CONSTANT[name]
    (node,) = simplify(graph(build)).nodes
    assert node.operation == "const"
    assert node.attribute == value and type(node.attribute) is type(value)


KEPT = {
    "x + 0.0 turns -0.0 into 0.0": lambda b: b.add("add", F32, (score(b), const(b, 0.0, F32))),
    "x - -0.0": lambda b: b.add("sub", F32, (score(b), const(b, -0.0, F32))),
    "x * 0.0 keeps NaN": lambda b: b.add("mul", F32, (score(b), const(b, 0.0, F32))),
    "x - x is NaN at inf": lambda b: b.add("sub", F32, (score(b), score(b))),
    "x == x is False at NaN": lambda b: b.add("eq", BOOL, (score(b), score(b))),
    "f64 as f32 as f64 rounds": lambda b: b.add(
        "cast", F64, (b.add("cast", F32, (score(b, F64),)),)
    ),
    "i64 as i32 as i64 wraps": lambda b: b.add("cast", I64, (b.add("cast", I32, (q_idx(b),)),)),
    "detach": lambda b: b.add("detach", F32, (score(b),)),
}


@pytest.mark.parametrize("name", sorted(KEPT))
def test_what_is_not_neutral_stays(name):
    before = graph(KEPT[name])
    assert simplify(before).text == before.text


def test_a_square_is_a_product():
    square = simplify(graph(lambda b: b.add("pow", F32, (score(b), const(b, 2.0, F32)))))
    assert [n.operation for n in square.nodes] == ["input", "mul"]


def test_equal_nodes_merge_and_dead_nodes_go():
    b = GraphBuilder()
    x = score(b)
    b.add("exp", F32, (x,))
    first = b.add("sin", F32, (x,))
    nodes = [*b.nodes, b.nodes[first]]  # a second sin(x), as a text may hold
    doubled = ModGraph((*nodes, type(nodes[0])("add", F32, (first, len(nodes) - 1))), len(nodes))
    assert [n.operation for n in simplify(doubled).nodes] == ["input", "sin", "add"]


def test_several_roots_keep_their_order():
    b = GraphBuilder()
    x = score(b)
    y = b.add("mul", F32, (x, const(b, 1.0, F32)))
    z = b.add("neg", F32, (y,))
    nodes, roots = simplify_nodes(b.nodes, (z, y, x, z))
    assert [nodes[r].operation for r in roots] == ["neg", "input", "input", "neg"]


def test_a_nan_constant_survives():
    node = simplify(graph(lambda b: b.add("neg", F32, (const(b, math.nan, F32),)))).nodes[0]
    assert isinstance(node.attribute, float) and math.isnan(node.attribute)


def test_numbers_are_not_folded():
    build = graph(
        lambda b: b.add("add", F32, (b.add("number", F32, (), "f0"), const(b, 1.0, F32)))
    )
    assert simplify(build).text == build.text


FLOAT_VALUES = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, math.inf, -math.inf, math.nan]


def random_graph(generator):
    """A graph of float, int and bool operations on special values."""
    b = GraphBuilder()
    floats = [score(b), *(const(b, v, F32) for v in FLOAT_VALUES[:5])]
    ints = [
        q_idx(b),
        b.add("input", I64, (), "kv_idx"),
        *(const(b, v, I64) for v in (-1, 0, 1, 2)),
    ]
    bools = [truth(b), const(b, True, BOOL), const(b, False, BOOL)]
    for _ in range(12):
        pick = generator.choice
        kind = generator.randrange(7)
        if kind <= 1:
            name = pick("add sub mul truediv minimum maximum pow".split())
            floats.append(b.add(name, F32, (pick(floats), pick(floats))))
        elif kind == 2:
            name = pick("add sub mul floordiv mod fmod and or xor minimum".split())
            ints.append(b.add(name, I64, (pick(ints), pick(ints))))
        elif kind == 3:
            source = pick([floats, ints])
            name = pick("eq ne lt le gt ge".split())
            bools.append(b.add(name, BOOL, (pick(source), pick(source))))
        elif kind == 4:
            bools.append(b.add(pick(["and", "or", "xor"]), BOOL, (pick(bools), pick(bools))))
            bools.append(b.add("not", BOOL, (pick(bools),)))
        elif kind == 5:
            floats.append(b.add("where", F32, (pick(bools), pick(floats), pick(floats))))
            floats.append(b.add(pick(["neg", "abs", "round", "floor"]), F32, (pick(floats),)))
        else:
            narrow = b.add("cast", pick([I32, torch.int8, BOOL]), (pick(ints),))
            ints.append(b.add("cast", I64, (narrow,)))
            wide = b.add("cast", F64, (pick(floats),))
            floats.append(b.add("cast", F32, (wide,)))
    output = b.add("where", F32, (bools[-1], floats[-1], floats[-2]))
    return ModGraph(tuple(b.nodes), output)


@pytest.mark.parametrize("seed", range(150))
def test_no_bit_of_a_random_graph_changes(seed):
    before = random_graph(random.Random(seed))
    after = simplify(before)
    assert len(after.nodes) <= len(before.nodes)
    s = torch.tensor(FLOAT_VALUES).view(-1, 1, 1)
    q, k = torch.arange(-3, 4).view(1, -1, 1), torch.arange(-2, 3).view(1, 1, -1)
    inputs = {"score": s, "q_idx": q, "kv_idx": k}
    values = []
    for each in (before, after):
        (value,) = evaluate(
            each.nodes, [each.output], inputs=inputs, captured=(), ints=(), floats=()
        )
        values.append(value.expand(9, 7, 5))
    # NaN equals NaN; 0.0 and -0.0 differ.
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(
        values[0].signbit() & ~values[0].isnan(), values[1].signbit() & ~values[1].isnan()
    )
