"""A tile of scores on which Triton's interpreter runs generated functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from anyflex.plugin import CapturedFacts, ModGraph, Node, Spec, evaluate

triton = pytest.importorskip("triton", reason="triton is not installed")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl  # noqa: E402

from anyflex_triton.mods import (  # noqa: E402
    load_module,
    source_for,
    write_source,
)

__all__ = ["Case", "M", "N"]

M, N = 16, 32


@triton.jit
def on_a_tile(
    scores, grads, lives, out, b, h, first_q, first_k, tables, ints, floats, totals,
    MOD: tl.constexpr, KIND: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, READ_ROWS: tl.constexpr,
    READ_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Run one of the functions on scores [M, N] whose rows are queries, or keys if TRANSPOSED."""
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
    # The side that a kernel's loop steps over is [N], after the other one.
    if READ_COLUMNS is not None and TRANSPOSED:
        tables = READ_COLUMNS(b, h, kv_idx, tables, ints, floats)
    if READ_ROWS is not None:
        rows = first_q + tl.arange(0, N) if TRANSPOSED else q_idx
        tables = READ_ROWS(b, h, rows, tables, ints, floats)
    if READ_COLUMNS is not None and not TRANSPOSED:
        tables = READ_COLUMNS(b, h, first_k + tl.arange(0, N), tables, ints, floats)
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
    """Spec with a tile of values to run it on."""

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
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.captured, self.ints, self.floats = tuple(captured), tuple(ints), tuple(floats)
        self.learned = tuple(learned)
        self.spec = Spec(
            "cuda",
            "sm_90",
            dtype,
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

    @property
    def source(self) -> str:
        """Return the text of the functions."""
        return write_source(self.spec)

    def run(
        self,
        name: str,
        kind: str,
        totals: tuple[torch.Tensor, ...] = (),
        *,
        short: bool = False,
        coarse: bool = False,
    ) -> torch.Tensor:
        out = torch.full((M, N), math.nan)
        numbers: list[int] = []
        for tensor in self.captured:
            numbers += [*tensor.shape, *tensor.stride()]
        tables = tuple(
            tensor.view(torch.int8) if tensor.dtype is torch.bool else tensor
            for tensor in self.captured
        )
        source = source_for(self.source, within=False, coarse=coarse, short=short)
        module = load_module(source)
        of_read = name.endswith("_of_read")
        on_a_tile[(1,)](
            self.score, self.grad, self.live.to(torch.int32), out, self.b, self.h, self.first_q,
            self.first_k, tables, (*numbers, *self.ints), self.floats, totals,
            MOD=getattr(module, name), KIND=kind, M=M, N=N, TRANSPOSED=self.transposed,
            ROWS=self.rows, READ_ROWS=getattr(module, "read_rows", None) if of_read else None,
            READ_COLUMNS=getattr(module, "read_columns", None) if of_read else None,
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
