"""Derivatives of every operation against torch's autograd, at random points and at kinks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from anyflex.mod_graph.differentiate import differentiate
from anyflex.mod_graph.evaluate import evaluate
from anyflex.mod_graph.graph import ModGraph
from anyflex.mod_graph.graph_builder import GraphBuilder
from anyflex.mod_graph.operations import RECORDS
from anyflex.mod_graph.operations.functions import FUNCTIONS

F32, F64, I64, BOOL = torch.float32, torch.float64, torch.int64, torch.bool
NAN, INF = math.nan, math.inf

# torch's own functions for each operation; autograd of these is the oracle.
TORCH_BINARY: dict[str, Callable] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.div,
    "floordiv": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "mod": torch.remainder,
    "fmod": torch.fmod,
    "pow": torch.pow,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "atan2": torch.atan2,
}
TORCH_UNARY: dict[str, Callable] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "sign": torch.sign,
    **{record.name: record.value for record in FUNCTIONS},
}
POINTS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.5, 3.0, 0.1, 1e-3, -7.25, INF, -INF, NAN]


class Mod:
    """A score mod written as nodes; `x` is the score, loads read captured tensors."""

    def __init__(self, dtype=F64):
        self.builder = GraphBuilder()
        self.dtype = dtype
        self.score = self.builder.add("input", dtype, (), "score")

    def index(self, name):
        return self.builder.add("input", I64, (), name)

    def load(self, position, *indices, dtype=None):
        return self.builder.add("load", dtype or self.dtype, indices, position)

    def const(self, value, dtype=None):
        return self.builder.add("const", dtype or self.dtype, (), value)

    def op(self, operation, *arguments, dtype=None):
        return self.builder.add(operation, dtype or self.dtype, arguments)

    def gradients(self, output, inputs, captured, wanted, grad, ints=(), floats=()):
        graph = ModGraph(tuple(self.builder.nodes), output)
        derivative = differentiate(graph, wanted_captured=frozenset(wanted))
        roots = [] if derivative.score is None else [derivative.score]
        for scatter in derivative.scatters:
            roots += [scatter.value, *scatter.indices]
        values = iter(
            evaluate(
                derivative.nodes,
                roots,
                inputs={**inputs, "grad": grad},
                captured=captured,
                ints=ints,
                floats=floats,
            )
        )
        shape = torch.broadcast_shapes(grad.shape, *(v.shape for v in inputs.values()))
        score = None if derivative.score is None else next(values).expand(shape)
        tables = {p: torch.zeros_like(captured[p]) for p in wanted}
        for scatter in derivative.scatters:
            value = next(values)
            indices = [next(values) for _ in scatter.indices]
            size = torch.broadcast_shapes(value.shape, shape)
            if not indices:
                tables[scatter.captured] += value.expand(size).sum()
            else:
                where = tuple(index.expand(size) for index in indices)
                tables[scatter.captured].index_put_(
                    where, value.expand(size).to(captured[scatter.captured].dtype), True
                )
        return score, tables, derivative


def same(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12, equal_nan=True)


def points(count, arity):
    generator = torch.Generator().manual_seed(count)
    random = 3 * torch.randn(count, arity, generator=generator, dtype=F64)
    unit = torch.rand(count, arity, generator=generator, dtype=F64) * 2 - 1
    if arity == 1:
        kinks = torch.tensor(POINTS, dtype=F64).view(-1, 1)
    else:
        kinks = torch.tensor([[x, y] for x in POINTS for y in POINTS], dtype=F64)
    return torch.cat([random, unit, kinks])


@pytest.mark.parametrize("operation", sorted(TORCH_UNARY))
def test_unary_derivatives_are_torchs(operation):
    x = points(40, 1)[:, 0]
    grad = torch.linspace(-2, 3, len(x), dtype=F64)
    mod = Mod()
    got, _, _ = mod.gradients(mod.op(operation, mod.score), {"score": x}, [], (), grad)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(TORCH_UNARY[operation](leaf), leaf, grad)
    same(torch.zeros_like(x) if got is None else got, expected)
    assert (got is None) == (not RECORDS[operation].gradients)


@pytest.mark.parametrize("operation", sorted(TORCH_BINARY))
def test_binary_derivatives_are_torchs(operation):
    both = points(40, 2)
    x, table = both[:, 0], both[:, 1].contiguous()
    grad = torch.linspace(-2, 3, len(x), dtype=F64)
    mod = Mod()
    y = mod.load(0, mod.index("q_idx"))
    got, tables, _ = mod.gradients(
        mod.op(operation, mod.score, y),
        {"score": x, "q_idx": torch.arange(len(x))},
        [table],
        (0,),
        grad,
    )
    leaves = x.clone().requires_grad_(), table.clone().requires_grad_()
    value = TORCH_BINARY[operation](*leaves)
    if operation == "floordiv":
        # torch gives zeros that are not connected to anything.
        assert got is None and not tables[0].any()
        return
    expected = torch.autograd.grad(value, leaves, grad)
    same(got, expected[0])
    same(tables[0], expected[1])


@pytest.mark.parametrize("exponent", [-2.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 2.5])
def test_powers_with_a_number_have_torchs_derivative(exponent):
    x = points(20, 1)[:, 0]
    grad = torch.linspace(1, 2, len(x), dtype=F64)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(leaf**exponent, leaf, grad)
    mod = Mod()
    got, _, _ = mod.gradients(
        mod.op("pow", mod.score, mod.const(exponent)), {"score": x}, [], (), grad
    )
    same(got, expected)
    mod = Mod()
    number = mod.builder.add("number", F64, (), "f0")
    got, _, _ = mod.gradients(
        mod.op("pow", mod.score, number), {"score": x}, [], (), grad, floats=(exponent,)
    )
    # torch's special path for x ** -0.5 differs from its general one at -inf and at -0.0.
    regular = (x != -INF) & (x != 0)
    same(got[regular], expected[regular])


@pytest.mark.parametrize("base", [-2.0, 0.0, 0.5, 2.0])
def test_powers_of_a_number_have_torchs_derivative(base):
    x = points(20, 1)[:, 0]
    grad = torch.linspace(1, 2, len(x), dtype=F64)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(base**leaf, leaf, grad)
    mod = Mod()
    got, _, _ = mod.gradients(
        mod.op("pow", mod.const(base), mod.score), {"score": x}, [], (), grad
    )
    same(got, expected)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("kind", ["const", "number", "captured"])
def test_a_number_is_a_clamp_and_passes_the_whole_gradient_at_a_bound(kind, swapped):
    x = torch.tensor([-2.0, -1.5, -1.0, 0.0, 1.5, 1.6, NAN], dtype=F64)
    grad = torch.arange(1.0, 8.0, dtype=F64)
    mod = Mod()
    low, high = {
        "const": lambda: (mod.const(-1.5), mod.const(1.5)),
        "number": lambda: tuple(mod.builder.add("number", F64, (), s) for s in ("f0", "f1")),
        "captured": lambda: (mod.load(0), mod.load(1)),
    }[kind]()
    ordered = (lambda x, y: (y, x)) if swapped else (lambda x, y: (x, y))
    clamped = mod.op("maximum", *ordered(mod.score, low))
    clamped = mod.op("minimum", *ordered(clamped, high))
    captured = [torch.tensor(-1.5, dtype=F64), torch.tensor(1.5, dtype=F64)]
    got, _, _ = mod.gradients(clamped, {"score": x}, captured, (), grad, floats=(-1.5, 1.5))
    leaf = x.clone().requires_grad_()
    if kind == "captured":  # a tie with a tensor is shared, whether it learns or not
        wanted = torch.minimum(torch.maximum(leaf, captured[0]), captured[1])
    else:
        wanted = leaf.clamp(-1.5, 1.5)
    (expected,) = torch.autograd.grad(wanted, leaf, grad)
    same(got, expected)


def test_where_sends_each_gradient_to_its_branch():
    x = torch.tensor([-1.0, 0.0, 2.0], dtype=F64)
    mod = Mod()
    root = mod.op("sqrt", mod.score)
    positive = mod.op("gt", mod.score, mod.const(0.0), dtype=BOOL)
    got, _, _ = mod.gradients(
        mod.op("where", positive, root, mod.const(0.0)), {"score": x}, [], (), torch.ones_like(x)
    )
    leaf = x.clone().requires_grad_()
    value = torch.where(leaf > 0, torch.sqrt(leaf), 0.0)
    (expected,) = torch.autograd.grad(value, leaf, torch.ones_like(x))
    # 0 * inf at 0, 0 * NaN below: as torch.
    assert expected[:2].isnan().all()
    same(got, expected)


def test_a_tensor_read_many_times_gets_the_sum():
    w = torch.tensor([0.3, -0.7, 1.1, 0.2], dtype=F64)
    q, k = torch.arange(4).view(4, 1), torch.arange(4).view(1, 4)
    s = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
    grad = torch.randn(4, 4, dtype=F64, generator=torch.Generator().manual_seed(2))
    mod = Mod()
    at_q, at_k = mod.load(0, mod.index("q_idx")), mod.load(0, mod.index("kv_idx"))
    product = mod.op("mul", at_q, mod.op("sigmoid", at_k))
    got, tables, derivative = mod.gradients(
        mod.op("add", mod.score, product), {"score": s, "q_idx": q, "kv_idx": k}, [w], (0,), grad
    )
    leaf = w.clone().requires_grad_()
    value = s + leaf[q] * torch.sigmoid(leaf[k])
    (expected,) = torch.autograd.grad(value, leaf, grad)
    assert len(derivative.scatters) == 2
    same(tables[0], expected)
    same(got, grad)


def test_a_0d_tensor_has_no_indices_and_a_sum():
    t = torch.tensor(0.4, dtype=F64)
    s = torch.tensor([1.0, 2.0], dtype=F64)
    mod = Mod()
    got, tables, derivative = mod.gradients(
        mod.op("mul", mod.score, mod.op("exp", mod.load(0))),
        {"score": s},
        [t],
        (0,),
        torch.ones_like(s),
    )
    assert derivative.scatters[0].indices == ()
    same(tables[0], 3 * t.exp())
    same(got, t.exp().expand(2))


def test_negative_indices_collide_where_they_wrap_to():
    w = torch.arange(4.0, dtype=F64)
    k = torch.tensor([-1, 3, 0])
    mod = Mod()
    _, tables, _ = mod.gradients(
        mod.op("add", mod.score, mod.load(0, mod.index("kv_idx"))),
        {"score": torch.zeros(3, dtype=F64), "kv_idx": k},
        [w],
        (0,),
        torch.tensor([1.0, 2.0, 4.0], dtype=F64),
    )
    assert tables[0].tolist() == [4.0, 0.0, 0.0, 3.0]


def test_unwanted_tensors_and_ignored_scores_have_no_derivative():
    mod = Mod()
    graph = ModGraph(
        (*mod.builder.nodes, *_nodes(mod, lambda: mod.load(0, mod.index("h")))),
        len(mod.builder.nodes) - 1,
    )
    derivative = differentiate(graph, wanted_captured=frozenset())
    assert derivative.score is None and derivative.scatters == () and derivative.nodes == ()
    wanted = differentiate(graph, wanted_captured=frozenset({0}))
    assert wanted.score is None and len(wanted.scatters) == 1


def _nodes(mod, make):
    before = len(mod.builder.nodes)
    make()
    return mod.builder.nodes[before:]


@pytest.mark.parametrize("stopper", ["floor", "ceil", "round", "trunc", "sign", "detach"])
def test_rounding_and_detach_stop_the_gradient(stopper):
    mod = Mod()
    graph = ModGraph(tuple(mod.builder.nodes), 0)
    output = mod.op("mul", mod.op(stopper, mod.score), mod.const(2.0))
    graph = ModGraph(tuple(mod.builder.nodes), output)
    assert differentiate(graph, wanted_captured=frozenset()).score is None


def test_casts_between_floats_pass_the_gradient_and_ints_stop_it():
    mod = Mod(F32)
    wide = mod.op("cast", mod.score, dtype=F64)
    table = mod.load(0, mod.index("q_idx"), dtype=F64)
    output = mod.op("cast", mod.op("mul", wide, table, dtype=F64), dtype=F32)
    s, w = torch.tensor([1.5, -2.0]), torch.tensor([0.1, 0.7], dtype=F64)
    got, tables, derivative = mod.gradients(
        output, {"score": s, "q_idx": torch.arange(2)}, [w], (0,), torch.ones(2)
    )
    assert derivative.nodes[derivative.score].dtype is F32
    assert derivative.nodes[derivative.scatters[0].value].dtype is F64
    same(got, w.float())
    same(tables[0], s.double())
    mod = Mod(F32)
    as_int = mod.op("cast", mod.score, dtype=I64)
    graph = ModGraph((*mod.builder.nodes, *_cast_back(mod, as_int)), len(mod.builder.nodes) - 1)
    assert differentiate(graph, wanted_captured=frozenset()).score is None


def _cast_back(mod, position):
    return _nodes(mod, lambda: mod.op("cast", position, dtype=F32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_tables_gradient_is_not_rounded_before_it_is_summed(dtype):
    mod = Mod(F32)
    read = mod.op("cast", mod.load(0, mod.index("kv_idx"), dtype=dtype), dtype=F32)
    graph_output = mod.op("add", mod.score, read)
    graph = ModGraph(tuple(mod.builder.nodes), graph_output)
    derivative = differentiate(graph, wanted_captured=frozenset({0}))
    (scatter,) = derivative.scatters
    assert derivative.nodes[scatter.value].dtype is F32
    assert all(node.operation != "cast" for node in derivative.nodes)


def test_an_index_gives_its_own_source_no_gradient():
    mod = Mod()
    inner = mod.load(0, mod.index("q_idx"))
    index = mod.op("cast", inner, dtype=I64)
    outer = mod.load(1, index)
    graph_output = mod.op("add", mod.score, outer)
    graph = ModGraph(tuple(mod.builder.nodes), graph_output)
    derivative = differentiate(graph, wanted_captured=frozenset({0, 1}))
    assert [scatter.captured for scatter in derivative.scatters] == [1]


def test_every_operation_has_a_derivative_test_or_no_derivative():
    tested = {*TORCH_UNARY, *TORCH_BINARY, "where", "cast"}
    assert {name for name, record in RECORDS.items() if record.gradients} <= tested
    undifferentiable = set(RECORDS) - tested
    assert undifferentiable == {
        *("input", "number", "const", "load", "detach", "and", "or", "xor", "not", "shl", "shr"),
        *("eq", "ne", "lt", "le", "gt", "ge"),
    }
