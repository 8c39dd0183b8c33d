"""Scope in which the spellings are evaluated: names, captured tensors, pairs, and torch one by
one."""

from __future__ import annotations

import linecache
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from anyflex.mod_graph.differentiate import Derivative, differentiate
from anyflex.mod_graph.evaluate import bounded_index, evaluate
from anyflex.mod_graph.graph import ModGraph
from anyflex.tracing.trace import TracedMod

__all__ = ["Pairs", "function_of", "one_by_one", "pairs", "tables", "traced_gradients"]

NAMES: dict[str, Any] = {
    "F": F,
    "math": math,
    "np": numpy,
    "numpy": numpy,
    "operator": operator,
    "torch": torch,
}
# Kinks, halves, zeros of both signs, points where activations change their formula, and no
# numbers.
SCORES = (
    "0 -0.0 0.5 -0.5 1.5 2.5 -2.5 0.3 -0.3 0.9 1 -1 3 -3 6 25 -25 100 -100 1e-3 0.1 -0.7 5.3 "
    "inf -inf nan"
)

Pairs = dict[str, Tensor]


def tables(dtype: torch.dtype, *, learned: bool = False) -> dict[str, Any]:
    """The captured tensors; those of `dtype` require a gradient where asked for."""
    generator = torch.Generator().manual_seed(3)

    def floats(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_(learned)

    return {
        "w": floats(16),
        "w2": floats(16, 16),
        "t0": floats(),
        "i16": torch.randint(0, 16, (16,), generator=generator).to(torch.int16),
        "u8": torch.arange(16).to(torch.uint8),
        "np_table": numpy.arange(16.0),
    }


def pairs(dtype: torch.dtype) -> Pairs:
    """Inputs of a score graph: vectors over the same pairs."""
    generator = torch.Generator().manual_seed(5)
    score = torch.tensor([float(value) for value in SCORES.split()], dtype=dtype)
    q_idx, kv_idx = (torch.randint(0, 16, score.shape, generator=generator) for _ in "qk")
    zero = torch.zeros_like(q_idx)
    return {"score": score, "b": zero, "h": zero, "q_idx": q_idx, "kv_idx": kv_idx}


def function_of(expression: str, captured: dict[str, Any]) -> Callable[..., Any]:
    """A score mod that returns the expression; its one line can be read back, as of a file."""
    source = f"lambda s, b, h, q, k: (lambda m: {expression})(q >= k)"
    file = f"<spelling {expression}>"
    linecache.cache[file] = (len(source), None, [source], file)
    return eval(compile(source, file, "eval"), {**NAMES, **captured})  # type: ignore[no-any-return]


def one_by_one(function: Callable[..., Any], given: Pairs) -> list[Tensor]:
    """torch's own results, a 0-d tensor a pair, with autograd."""
    rows = zip(*(given[name] for name in ("score", "b", "h", "q_idx", "kv_idx")), strict=True)
    return [torch.as_tensor(function(*row)) for row in rows]


def traced_gradients(
    traced: TracedMod, graph: ModGraph, given: Pairs, grad: Tensor
) -> tuple[Tensor, dict[int, Tensor], dict[int, Tensor]]:
    """Gradients of ``(grad * result).sum()`` by the graph's derivative.

    Returns:
        (that of the score, that of each captured tensor that requires one by its position, the
        sum of the magnitudes that the latter were added up from).
    """
    wanted = frozenset(i for i, tensor in enumerate(traced.captured) if tensor.requires_grad)
    derivative = differentiate(graph, wanted_captured=wanted)
    values = iter(_values(derivative, traced, {**given, "grad": grad}))
    count = len(grad)
    score = torch.zeros_like(given["score"])
    if derivative.score is not None:
        score = next(values).expand(count)
    sums = {i: torch.zeros(traced.captured[i].shape, dtype=torch.float64) for i in wanted}
    sizes = {i: torch.zeros_like(total) for i, total in sums.items()}
    for scatter in derivative.scatters:
        value = next(values).expand(count).double()
        shape = traced.captured[scatter.captured].shape
        index = tuple(
            bounded_index(next(values).expand(count), size)[0]
            for size, _ in zip(shape, scatter.indices, strict=True)
        )
        for total, part in ((sums, value), (sizes, value.abs())):
            if index:
                total[scatter.captured].index_put_(index, part, accumulate=True)
            else:
                total[scatter.captured].add_(part.sum())
    return score, sums, sizes


def _values(derivative: Derivative, traced: TracedMod, inputs: Pairs) -> Sequence[Tensor]:
    roots = [] if derivative.score is None else [derivative.score]
    for scatter in derivative.scatters:
        roots += [scatter.value, *scatter.indices]
    return evaluate(
        derivative.nodes,
        roots,
        inputs=inputs,
        captured=[tensor.detach() for tensor in traced.captured],
        ints=traced.ints,
        floats=traced.floats,
    )
