"""Node of a mod graph: one scalar value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyflex.mod_graph.operations import DTYPE_NAMES

__all__ = ["Attribute", "Node"]

Attribute = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Node:
    """One scalar value.

    Args:
        operation: a name of `anyflex.mod_graph.operations.OPERATIONS`.
        dtype: the value's type. All operands of arithmetic, comparisons and `where` branches have
            one dtype: the tracer inserts casts where torch would promote.
        arguments: positions of the operands in the graph's nodes, all smaller than its own.
        attribute: an input's name, a number's slot (``"i0"``, ``"f2"``), a constant's value, or a
            load's position in the call's captured tensors. An integer constant is one that its
            type holds.
    """

    operation: str
    dtype: torch.dtype
    arguments: tuple[int, ...] = ()
    attribute: Attribute = None

    def __str__(self) -> str:
        attribute = "-" if self.attribute is None else str(self.attribute)
        arguments = ",".join(map(str, self.arguments)) or "-"
        return f"{self.operation} {DTYPE_NAMES[self.dtype]} {arguments} {attribute}"
