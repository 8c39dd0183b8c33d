"""Terms of a formula that is written with Python's operators: of a derivative, or of a bound."""

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
        return Term(self.builder, self.builder.add("const", self.dtype, (), self._held(value)))

    def _held(self, value: float) -> float:
        if self.dtype is torch.bool:
            return bool(value)
        return float(value) if self.dtype.is_floating_point else int(value)

    def cast(self, dtype: torch.dtype) -> Term:
        """Return the value converted to a type."""
        if self.dtype is dtype:
            return self
        return Term(self.builder, self.builder.add("cast", dtype, (self.position,)))

    def test(self, comparison: str, other: Term | float) -> Term:
        """Return the bool of a comparison: ``x.test("lt", y)``."""
        arguments = (self.position, self.beside(other).position)
        return Term(self.builder, self.builder.add(comparison, torch.bool, arguments))

    def beside(self, other: Term | float) -> Term:
        """Return a term as it is, and a number as a constant of this term's type."""
        return other if isinstance(other, Term) else self.constant(other)

    def __add__(self, other: Term | float) -> Term:
        return call("add", self, other)

    def __radd__(self, other: float) -> Term:
        return call("add", self, other)

    def __sub__(self, other: Term | float) -> Term:
        return call("sub", self, other)

    def __rsub__(self, other: float) -> Term:
        return call("sub", other, self)

    def __mul__(self, other: Term | float) -> Term:
        return call("mul", self, other)

    def __rmul__(self, other: float) -> Term:
        return call("mul", self, other)

    def __truediv__(self, other: Term | float) -> Term:
        return call("truediv", self, other)

    def __rtruediv__(self, other: float) -> Term:
        return call("truediv", other, self)

    def __floordiv__(self, other: Term | float) -> Term:
        return call("floordiv", self, other)

    def __rfloordiv__(self, other: float) -> Term:
        return call("floordiv", other, self)

    def __neg__(self) -> Term:
        return call("neg", self)

    def __invert__(self) -> Term:
        return call("not", self)

    def __and__(self, other: Term | bool) -> Term:
        return call("and", self, other)

    def __rand__(self, other: bool) -> Term:
        return call("and", self, other)

    def __or__(self, other: Term | bool) -> Term:
        return call("or", self, other)

    def __ror__(self, other: bool) -> Term:
        return call("or", self, other)

    def __xor__(self, other: Term | bool) -> Term:
        return call("xor", self, other)

    def __rxor__(self, other: bool) -> Term:
        return call("xor", self, other)

    def __lshift__(self, other: Term | int) -> Term:
        return call("shl", self, other)

    def __rlshift__(self, other: int) -> Term:
        return call("shl", other, self)

    def __rshift__(self, other: Term | int) -> Term:
        return call("shr", self, other)

    def __rrshift__(self, other: int) -> Term:
        return call("shr", other, self)

    def __lt__(self, other: Term | float) -> Term:
        return self.test("lt", other)

    def __le__(self, other: Term | float) -> Term:
        return self.test("le", other)

    def __gt__(self, other: Term | float) -> Term:
        return self.test("gt", other)

    def __ge__(self, other: Term | float) -> Term:
        return self.test("ge", other)


def call(operation: str, *operands: Term | float) -> Term:
    """Append an operation whose operands and result have one type. One operand is a term; numbers
    beside it become constants."""
    first = next(operand for operand in operands if isinstance(operand, Term))
    arguments = tuple(first.beside(operand).position for operand in operands)
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
