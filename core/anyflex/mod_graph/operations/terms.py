"""Terms of a derivative's formula, which is written with Python's operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyflex.mod_graph.graph_builder import GraphBuilder, is_number

__all__ = ["Term", "call", "where"]


@dataclass(slots=True, eq=False)
class Term:
    """A value in the graph under construction. Operators append nodes of its type; a number beside
    it becomes a constant of its type.

    Args:
        builder: holds the graph's nodes.
        position: of the value among them.
    """

    builder: GraphBuilder
    position: int

    @property
    def dtype(self) -> torch.dtype:
        return self.builder.nodes[self.position].dtype

    @property
    def is_number(self) -> bool:
        """Whether the value is a Python number, converted or not."""
        return is_number(self.builder.nodes, self.position)

    def constant(self, value: float) -> Term:
        """Return a number of this term's type."""
        return Term(self.builder, self.builder.add("const", self.dtype, (), float(value)))

    def test(self, comparison: str, other: Term | float) -> Term:
        """Return the bool of a comparison: ``x.test("lt", y)``."""
        other = self._beside(other)
        arguments = (self.position, other.position)
        return Term(self.builder, self.builder.add(comparison, torch.bool, arguments))

    def _beside(self, other: Term | float) -> Term:
        return other if isinstance(other, Term) else self.constant(other)

    def __add__(self, other: Term | float) -> Term:
        return call("add", self, self._beside(other))

    def __mul__(self, other: Term | float) -> Term:
        return call("mul", self, self._beside(other))

    def __truediv__(self, other: Term | float) -> Term:
        return call("truediv", self, self._beside(other))

    def __rtruediv__(self, other: float) -> Term:
        return call("truediv", self.constant(other), self)

    def __neg__(self) -> Term:
        return call("neg", self)

    def __and__(self, other: Term) -> Term:
        return call("and", self, other)


def call(operation: str, *operands: Term) -> Term:
    """Append an operation whose result has its first operand's type."""
    first = operands[0]
    arguments = tuple(operand.position for operand in operands)
    return Term(first.builder, first.builder.add(operation, first.dtype, arguments))


def where(condition: Term, x: Term | float, y: Term | float) -> Term:
    """Append a selection; one of `x` and `y` is a term. A gradient is dropped by
    ``where(condition, 0.0, gradient)``, never by a product with 0, which keeps NaN."""
    if not isinstance(x, Term):
        assert isinstance(y, Term)
        x = y.constant(x)
    elif not isinstance(y, Term):
        y = x.constant(y)
    arguments = (condition.position, x.position, y.position)
    return Term(x.builder, x.builder.add("where", x.dtype, arguments))
