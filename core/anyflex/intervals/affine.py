"""Affine forms: an integer node as a constant plus multiples of other nodes.

The range of ``q - k`` taken operand by operand is far too wide for ``(q + 5) - (q - k)``; as forms
the two q cancel. Comparisons look at the form of the difference of their sides, which decides
causal, window, prefix and offset masks exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anyflex.mod_graph.dtypes import type_class
from anyflex.mod_graph.node import Node

__all__ = ["AffineForm", "affine_form"]


@dataclass(frozen=True, slots=True)
class AffineForm:
    """``constant + sum(coefficient * atom)``, atoms being positions of nodes."""

    constant: int
    terms: tuple[tuple[int, int], ...]
    """(atom, coefficient), no coefficient 0, atoms ascending."""

    def plus(self, other: AffineForm, factor: int = 1) -> AffineForm:
        """Return ``self + factor * other``."""
        terms = dict(self.terms)
        for atom, coefficient in other.terms:
            terms[atom] = terms.get(atom, 0) + factor * coefficient
        kept = tuple(sorted((a, c) for a, c in terms.items() if c))
        return AffineForm(self.constant + factor * other.constant, kept)

    def is_atom(self, position: int) -> bool:
        """Tell whether this is the node itself."""
        return self.constant == 0 and self.terms == ((position, 1),)


def affine_form(
    nodes: Sequence[Node], position: int, forms: Sequence[AffineForm | None]
) -> AffineForm:
    """Return the form of an integer node, given those of its operands (None: not an integer).

    The caller makes sure that the nodes don't wrap.
    """
    node = nodes[position]
    operands = [forms[argument] for argument in node.arguments]
    if node.operation == "const":
        assert isinstance(node.attribute, int)
        return AffineForm(int(node.attribute), ())
    x = operands[0] if operands else None
    y = operands[1] if len(operands) > 1 else None
    if x is not None:
        if node.operation == "detach":
            return x
        if node.operation == "neg":
            return AffineForm(0, ()).plus(x, -1)
        if node.operation == "cast" and type_class(nodes[node.arguments[0]].dtype) == "int":
            return x
    if x is not None and y is not None:
        if node.operation == "add":
            return x.plus(y)
        if node.operation == "sub":
            return x.plus(y, -1)
        if node.operation == "mul" and not y.terms:
            return AffineForm(0, ()).plus(x, y.constant)
        if node.operation == "mul" and not x.terms:
            return AffineForm(0, ()).plus(y, x.constant)
        if node.operation == "shl" and not y.terms and 0 <= y.constant < 62:
            return AffineForm(0, ()).plus(x, 1 << y.constant)
    return AffineForm(0, ((position, 1),))
