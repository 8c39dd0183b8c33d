"""Mods as Triton source, run by Triton's interpreter against core's evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from anyflex.plugin import (
    DTYPES,
    OPERATIONS,
    CapturedFacts,
    ModGraph,
    Node,
    Spec,
    differentiate,
    evaluate,
    operand_classes,
    parse_graph,
    simplify,
)

triton = pytest.importorskip("triton", reason="triton is not installed")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl  # noqa: E402
from anyflex_triton.mods import TRITON, load_source, write_source  # noqa: E402

# numpy says what it divides by zero.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

M, N = 16, 32
FLOATS = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5, 2.5, -2.5, 3.0, -7.25, 0.3, -0.04, 1e-4]
FLOATS += [20.25, -30.5, 88.0, 1000.0, math.inf, -math.inf, math.nan]
INTEGERS = [0, 1, -1, 2, -2, 3, -3, 5, 7, 8, -9, 31, 32, -32, 63, 64, -65, 100, 127, -128]
OPERAND_TYPES = {
    "bool": ("bool",),
    "int": ("u8", "i8", "i16", "i32", "i64"),
    "float": ("f16", "bf16", "f32", "f64"),
}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@triton.jit
def on_a_tile(
    scores, grads, lives, out, b, h, first_q, first_k, tables, ints, floats, totals,
    MOD: tl.constexpr, KIND: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One of the functions, on scores [M, N] whose rows are queries, or keys if TRANSPOSED."""
    places = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    score = tl.load(scores + places)
    grad = tl.load(grads + places)
    live = tl.load(lives + places) != 0
    if TRANSPOSED:
        kv_idx = first_k + tl.arange(0, M)[:, None]
        q_idx = first_q + tl.arange(0, N)[None, :]
    else:
        q_idx = first_q + tl.arange(0, M)[:, None]
        kv_idx = first_k + tl.arange(0, N)[None, :]
    if ROWS:
        h = h + tl.arange(0, M)[:, None] % 2
    if KIND == "score":
        found = MOD(score, b, h, q_idx, kv_idx, tables, ints, floats)
        tl.store(out + places, found)
    if KIND == "mask":
        kept = MOD(b, h, q_idx, kv_idx, tables, ints, floats)
        tl.store(out + places, tl.broadcast_to(tl.where(kept, 1.0, 0.0), [M, N]))
    if KIND == "backward":
        found = MOD(grad, score, b, h, q_idx, kv_idx, tables, ints, floats)
        tl.store(out + places, found)
    if KIND == "captured":
        MOD(grad, score, live, b, h, q_idx, kv_idx, tables, ints, floats, totals)


class Case:
    """A spec, and a tile of values to run it on."""

    def __init__(
        self,
        score: ModGraph | None,
        mask: ModGraph | None = None,
        captured: Sequence[torch.Tensor] = (),
        learned: Sequence[int] = (),
        ints: Sequence[int] = (),
        floats: Sequence[float] = (),
        *,
        b: int = 0,
        h: int = 0,
        first_q: int = 0,
        first_k: int = 0,
        transposed: bool = False,
        rows: bool = False,
    ) -> None:
        self.captured, self.ints, self.floats = tuple(captured), tuple(ints), tuple(floats)
        self.learned = tuple(learned)
        self.spec = Spec(
            "cuda",
            "sm_90",
            torch.float32,
            64,
            64,
            score_graph=score,
            mask_graph=mask,
            captured=tuple(
                CapturedFacts(tensor.dtype, tensor.dim(), i in self.learned)
                for i, tensor in enumerate(self.captured)
            ),
            gradients=("q",),
        )
        generator = torch.Generator().manual_seed(5)
        self.score = torch.randn(M, N, generator=generator) * 2
        self.grad = torch.randn(M, N, generator=generator)
        self.live = torch.rand(M, N, generator=generator) < 0.8
        self.b, self.h, self.first_q, self.first_k = b, h, first_q, first_k
        self.transposed, self.rows = transposed, rows

    def inputs(self) -> dict[str, torch.Tensor]:
        rows, columns = torch.arange(M)[:, None], torch.arange(N)[None]
        q_idx, kv_idx = (columns, rows) if self.transposed else (rows, columns)
        h = torch.tensor(self.h) + (rows % 2 if self.rows else 0)
        return {
            "score": self.score,
            "grad": self.grad,
            "b": torch.tensor(self.b),
            "h": h,
            "q_idx": q_idx + self.first_q,
            "kv_idx": kv_idx + self.first_k,
        }

    def run(self, name: str, kind: str, totals: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
        out = torch.full((M, N), math.nan)
        numbers: list[int] = []
        for tensor in self.captured:
            numbers += [*tensor.shape, *tensor.stride()]
        tables = tuple(
            tensor.view(torch.int8) if tensor.dtype is torch.bool else tensor
            for tensor in self.captured
        )
        module = load_source(write_source(self.spec))
        on_a_tile[(1,)](
            self.score, self.grad, self.live.to(torch.int32), out, self.b, self.h, self.first_q,
            self.first_k, tables, (*numbers, *self.ints), self.floats, totals,
            MOD=getattr(module, name), KIND=kind, M=M, N=N, TRANSPOSED=self.transposed,
            ROWS=self.rows,
        )  # fmt: skip
        return out

    def evaluated(self, nodes: Sequence[Node], wanted: Sequence[int]) -> list[torch.Tensor]:
        return evaluate(
            nodes,
            wanted,
            inputs=self.inputs(),
            captured=self.captured,
            ints=self.ints,
            floats=self.floats,
        )

    def value(self, graph: ModGraph) -> torch.Tensor:
        (value,) = self.evaluated(graph.nodes, [graph.output])
        return value.expand(M, N)


def values_of(name: str) -> torch.Tensor:
    dtype = DTYPES[name]
    if name == "bool":
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        return torch.tensor(FLOATS, dtype=torch.float64).to(dtype)
    limits = torch.iinfo(dtype)
    kept = [v for v in INTEGERS if limits.min <= v <= limits.max]
    return torch.tensor([*kept, limits.min, limits.max, limits.max - 1], dtype=dtype)


def pairs(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[M * N] values: all pairs of tricky ones, some again."""
    values = values_of(name)
    first, second = torch.meshgrid(values, values, indexing="ij")
    again = -(-M * N // first.numel())
    return first.flatten().repeat(again)[: M * N], second.flatten().repeat(again)[: M * N]


PAIR = "input i64 - q_idx;input i64 - kv_idx;const i64 - 32;mul i64 0,2 -;add i64 3,1 -"


def operation_nodes(operation: str, name: str) -> list[Node]:
    """Two captured tensors are the operands: no type is converted on the way."""
    dtype, count = DTYPES[name], OPERATIONS[operation]
    nodes = list(parse_graph(f"{PAIR};=4").nodes)
    nodes += [Node("load", dtype, (4,), 0), Node("load", dtype, (4,), 1)]
    arguments = (5, 6)[:count]
    if count == 3:
        nodes.append(Node("lt", torch.bool, (5, 6)))
        arguments = (7, 5, 6)
    nodes.append(Node(operation, torch.bool if operation in COMPARISONS else dtype, arguments))
    return nodes


def checked(nodes: list[Node], captured: Sequence[torch.Tensor], skip: Any = None) -> None:
    """The last node's value is core's."""
    result = nodes[-1].dtype
    last = len(nodes) - 1
    wanted = Case(None, captured=captured).evaluated(nodes, [last])[0].expand(M, N)
    keep = torch.ones(M, N, dtype=torch.bool) if skip is None else ~skip.view(M, N)
    if not result.is_floating_point:
        # float32 can't tell wide integers apart: the comparison is made in the mod.
        nodes = [*nodes, Node("load", result, (4,), len(captured))]
        nodes.append(Node("eq", torch.bool, (last, last + 1)))
        case = Case(
            None, ModGraph(tuple(nodes), last + 2), [*captured, wanted.reshape(-1).contiguous()]
        )
        equal = case.run("mask_mod", "mask")
        assert equal[keep].eq(1).all(), (equal == 0).logical_and(keep).nonzero()[:5]
        return
    found = Case(ModGraph(tuple(nodes), last), captured=captured).run("score_mod", "score")
    # Of the narrow types the last bit may fall either way.
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
        # A negative exponent of 0: torch has no answer.
        skip = (first == 0) & (second < 0)
    if operation in ("floordiv", "mod", "fmod") and not DTYPES[name].is_floating_point:
        # Division by 0 gives something; torch's of the least number by -1 traps or wraps.
        skip = (second == 0) | ((first == torch.iinfo(DTYPES[name]).min) & (second + 1 == 0))
        second = torch.where(skip, 1, second)
    checked(operation_nodes(operation, name), [first, second], skip)
