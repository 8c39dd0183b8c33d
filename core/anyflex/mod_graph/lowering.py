"""Lowering: a table from operations to a target, and the walk that applies it to a graph.

A backend makes one `Lowering` a target and owns its table alone:

    MSL = Lowering("Metal", {"add": "({0} + {1})", "mod:float": "floored({0}, {1})", ...}, emit)

`Lowering.problems` says what a table lacks or has too much; a test keeps it empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeAlias, TypeVar

import torch

from anyflex.mod_graph.dtypes import type_class
from anyflex.mod_graph.node import Node, reached
from anyflex.mod_graph.operations import OPERATIONS, RECORDS

__all__ = ["Emit", "Lowering", "Rule", "operand_classes"]

Context = TypeVar("Context")
Value = TypeVar("Value")

Rule: TypeAlias = "str | Callable[[Context, Node, Sequence[Value]], Value]"
"""Text with ``{0}``, ``{1}`` for the operands, ``{attribute}`` and ``{type}`` (the result's), or a
function of the context, the node and the operands' values."""

Emit: TypeAlias = "Callable[[Context, Node, str], Value]"
"""Takes the text of a filled-in rule into the target's program and returns its value's name."""


def operand_classes(operation: str) -> tuple[str, ...]:
    """Return the type classes that the operands of `operation` can have in a graph."""
    return RECORDS[operation].types


class Lowering(Generic[Context, Value]):
    """A target's table.

    Args:
        target: its name, for messages.
        rules: keys are operations, or ``"operation:class"`` with class bool, int or float for
            operations whose text depends on the type; the longer key wins. The class is that of
            the operands (of a cast: what it converts from); for leaves, loads and `where` that of
            the result.
        emit: takes text rules; may be absent if the table has none.
        types: dtype -> the target's name of it, for ``{type}``; one that a rule asks for and that
            isn't there is a KeyError.
    """

    def __init__(
        self,
        target: str,
        rules: Mapping[str, Rule[Context, Value]],
        emit: Emit[Context, Value] | None = None,
        types: Mapping[torch.dtype, str] | None = None,
    ) -> None:
        self.target = target
        self.rules = dict(rules)
        self.types = dict(types or {})
        self._emit = emit

    def missing(self) -> list[str]:
        """Return the operations, by class where only some are there, that the table lacks."""
        lacking = []
        for operation in OPERATIONS:
            if operation not in self.rules:
                keys = [f"{operation}:{kind}" for kind in operand_classes(operation)]
                lacking += [key for key in keys if key not in self.rules]
        return lacking

    def problems(self) -> list[str]:
        """Return a sentence for each rule that the table lacks, and for each that no graph asks
        for."""
        found = [f"the {self.target} table has no rule for {key!r}" for key in self.missing()]
        for key in self.rules:
            operation, _, kind = key.partition(":")
            if operation not in OPERATIONS:
                found.append(f"the {self.target} table has {key!r}, which is no operation")
            elif kind and kind not in operand_classes(operation):
                found.append(f"the {self.target} table has {key!r}, but no {kind} comes there")
        return found

    def operations(self) -> frozenset[str]:
        """Names of the operations that the table covers, for ``Capabilities.operations``."""
        lacking = {key.partition(":")[0] for key in self.missing()}
        return frozenset(OPERATIONS) - lacking

    def rule(self, nodes: Sequence[Node], node: Node) -> Rule[Context, Value]:
        """Return the rule for `node`, whose arguments count into `nodes`.

        Raises KeyError if there is none: `Capabilities.operations` should have refused the graph.
        """
        typed_by_result = not node.arguments or node.operation in ("where", "load")
        dtype = node.dtype if typed_by_result else nodes[node.arguments[0]].dtype
        found = self.rules.get(f"{node.operation}:{type_class(dtype)}")
        if found is None:
            found = self.rules.get(node.operation)
        if found is None:
            raise KeyError(f"{self.target} has no rule for {node.operation} of {dtype}")
        return found

    def apply(
        self,
        rule: Rule[Context, Value],
        context: Context,
        node: Node,
        operands: Sequence[Value],
    ) -> Value:
        """Return the value of one node."""
        if not isinstance(rule, str):
            return rule(context, node, operands)
        if self._emit is None:
            raise TypeError(f"the {self.target} table has text rules and no emit function")
        if "{type" in rule and node.dtype not in self.types:
            # Without it the text may still compile, and leave a cast out.
            raise KeyError(f"{self.target} has no name for {node.dtype}, of {node.operation}")
        text = rule.format(
            *operands, attribute=node.attribute, type=self.types.get(node.dtype, "")
        )
        return self._emit(context, node, text)

    def lower(
        self, nodes: Sequence[Node], context: Context, wanted: Iterable[int]
    ) -> dict[int, Value]:
        """Lower, in order, the nodes that `wanted` need; return position -> value of each."""
        values: dict[int, Value] = {}
        for position in reached(nodes, wanted):
            node = nodes[position]
            operands = [values[argument] for argument in node.arguments]
            values[position] = self.apply(self.rule(nodes, node), context, node, operands)
        return values
