"""Node of a mod graph: one scalar value."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from anyflex.mod_graph.dtypes import DTYPE_NAMES

__all__ = ["Attribute", "Node", "reached"]

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

    @property
    def value(self) -> bool | int | float:
        """A constant's value, rounded to its type; a number beyond a floating type's range is
        infinite."""
        value = self.attribute
        assert isinstance(value, (bool, int, float))
        if self.dtype is torch.bool:
            return bool(value)
        if not self.dtype.is_floating_point:
            return int(value)
        if abs(value) > torch.finfo(self.dtype).max:
            return math.copysign(math.inf, value)
        # Shortcuts for the usual types: making a tensor takes several times as long.
        if self.dtype is torch.float64:
            return float(value)
        if self.dtype is torch.float32:
            return ctypes.c_float(value).value
        return float(torch.tensor(value, dtype=self.dtype, device="cpu").item())

    def __str__(self) -> str:
        attribute = "-" if self.attribute is None else str(self.attribute)
        arguments = ",".join(map(str, self.arguments)) or "-"
        return f"{self.operation} {DTYPE_NAMES[self.dtype]} {arguments} {attribute}"


def reached(nodes: Sequence[Node], roots: Iterable[int]) -> list[int]:
    """Return the positions of the nodes that `roots` need, the roots included, in order."""
    needed = set(roots)
    for position in range(len(nodes) - 1, -1, -1):
        if position in needed:
            needed.update(nodes[position].arguments)
    return sorted(needed)
