"""Reverse-mode differentiation of a score mod's graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyflex.mod_graph.graph import ModGraph
from anyflex.mod_graph.graph_builder import GraphBuilder
from anyflex.mod_graph.node import Node
from anyflex.mod_graph.operations import RECORDS
from anyflex.mod_graph.operations.terms import Term
from anyflex.mod_graph.simplify import simplify_nodes

__all__ = ["Derivative", "Scatter", "differentiate"]


@dataclass(frozen=True, slots=True)
class Scatter:
    """``gradient(captured)[indices] += value``, for every live pair.

    Args:
        captured: position in the call's captured tensors.
        indices: node positions, one a dimension, as the load had them: -N..-1 wraps, then the
            index clamps. Empty for a 0-d tensor.
        value: node position. As wide as the score for tables of a narrower type: rounding waits
            for the sum.
    """

    captured: int
    indices: tuple[int, ...]
    value: int


@dataclass(frozen=True, slots=True)
class Derivative:
    """The gradients of a score mod.

    Args:
        nodes: in evaluation order. Beside the score mod's inputs they read input ``grad``, the
            gradient of the modified score, of the graph's own type.
        score: position of the gradient of the score that went in; None where it is exactly 0.
        scatters: additions to the captured tensors' gradients. A wanted tensor without a
            scatter has gradient 0.
    """

    nodes: tuple[Node, ...]
    score: int | None
    scatters: tuple[Scatter, ...]

    @property
    def roots(self) -> tuple[int, ...]:
        """Positions of all results: the score's gradient, then each scatter's value and
        indices."""
        scattered = (p for scatter in self.scatters for p in (scatter.value, *scatter.indices))
        return (*(() if self.score is None else (self.score,)), *scattered)


def differentiate(graph: ModGraph, *, wanted_captured: frozenset[int]) -> Derivative:
    """Return the gradients of a score mod with torch's conventions.

    Kinks are torch's: abs has slope 0 at 0, minimum and maximum share the gradient at ties, and
    what a clamp (minimum or maximum against a number) passes at the bound, `torch_derivatives`
    says. Rounding, comparisons, casts to ints and indices stop it; closed-over numbers have none.
    Where the untaken branch of a `where` has an infinite derivative the gradient is NaN, as in
    torch.

    Args:
        graph: with a floating result.
        wanted_captured: positions of the captured tensors that need a gradient.
    """
    active = _active(graph, wanted_captured)
    builder = GraphBuilder(graph.nodes)
    adjoints: dict[int, int] = {}

    def accumulate(position: int, grad: int) -> None:
        dtype = _adjoint_type(graph.nodes[position], graph.dtype)
        if builder.nodes[grad].dtype is not dtype:
            grad = builder.add("cast", dtype, (grad,))
        if position in adjoints:
            grad = builder.add("add", dtype, (adjoints[position], grad))
        adjoints[position] = grad

    if graph.output in active:
        accumulate(graph.output, builder.add("input", graph.dtype, (), "grad"))
    for position in range(graph.output, -1, -1):
        if position not in adjoints or graph.nodes[position].operation in ("load", "input"):
            continue
        node = graph.nodes[position]
        given, *terms = (
            Term(builder, place) for place in (adjoints[position], position, *node.arguments)
        )
        gradients = [
            (argument, formula(given, *terms).position)
            for argument, formula in zip(
                node.arguments, RECORDS[node.operation].gradients, strict=True
            )
            if formula is not None and argument in active
        ]
        for argument, gradient in gradients:
            accumulate(argument, gradient)
    return _assembled(graph, builder, adjoints)


def _active(graph: ModGraph, wanted_captured: frozenset[int]) -> set[int]:
    """Positions through which a gradient flows to the score or to a wanted captured tensor."""
    active: set[int] = set()
    for position, node in enumerate(graph.nodes):
        if not node.dtype.is_floating_point:
            continue
        if node.operation == "input":
            reached = node.attribute == "score"
        elif node.operation == "load":
            reached = node.attribute in wanted_captured
        else:
            arguments = node.arguments[1:] if node.operation == "where" else node.arguments
            reached = bool(RECORDS[node.operation].gradients) and any(
                a in active for a in arguments
            )
        if reached:
            active.add(position)
    return active


def _adjoint_type(node: Node, score: torch.dtype) -> torch.dtype:
    """A table's gradient is summed as wide as scores are, then rounded to a narrow type."""
    if node.operation == "load" and node.dtype in (torch.float16, torch.bfloat16):
        return torch.float64 if score is torch.float64 else torch.float32
    return node.dtype


def _assembled(graph: ModGraph, builder: GraphBuilder, adjoints: dict[int, int]) -> Derivative:
    score: int | None = None
    loads: list[int] = []
    for position in sorted(adjoints):
        operation = graph.nodes[position].operation
        if operation == "input":
            grad = adjoints[position]
            score = grad if score is None else builder.add("add", graph.dtype, (score, grad))
        elif operation == "load":
            loads.append(position)
    roots = [] if score is None else [score]
    for load in loads:
        roots += [adjoints[load], *graph.nodes[load].arguments]
    nodes, places = simplify_nodes(builder.nodes, roots)
    remaining = iter(places)
    if score is not None:
        score = next(remaining)
    scatters = []
    for load in loads:
        value = next(remaining)
        indices = tuple(next(remaining) for _ in graph.nodes[load].arguments)
        captured = graph.nodes[load].attribute
        assert isinstance(captured, int)
        scatters.append(Scatter(captured, indices, value))
    return Derivative(nodes, score, tuple(scatters))
