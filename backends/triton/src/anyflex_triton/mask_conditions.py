"""Mask mods as conditions: comparisons of numbers, and the logic that joins them.

Compilers that choose between a score and -inf by two conditions emit two selects. A language that
receives the comparisons instead of their result can emit one: see `mask_select_ptx` of
anyflex_cuda.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from anyflex.plugin import Node

__all__ = ["Bound", "Conditions", "Operand", "conditions_of"]

_MOST = 6
"""Maximum number of comparisons; each takes a predicate, of which a thread has seven."""

_JOINS = ("and", "or", "xor", "not")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}

_KEY = Node("input", torch.int64, (), "kv_idx")

_LARGEST_INDEX = 1 << 28
"""Bound of indices, and of the numbers that are known to be added to them."""


class Operand(NamedTuple):
    """Value of a node, in a type of Triton's."""

    position: int
    type: str

    def positions(self) -> Iterator[int]:
        """Yield the positions of the nodes that the operand needs."""
        yield self.position


class Bound(NamedTuple):
    """Right-hand side of a comparison with ``kv_idx``: a sum of nodes that don't depend on it,
    each times 1 or -1.

    Args:
        terms: (position, factor); their sum stays below 2^28 whatever the values are.
        clamped: one more term, of any size: beyond 2^29 it decides the comparison alone.
    """

    terms: tuple[tuple[int, int], ...]
    clamped: tuple[int, int] | None

    def positions(self) -> Iterator[int]:
        """Yield the positions of the nodes that the bound needs."""
        for position, _ in (*self.terms, *((self.clamped,) if self.clamped else ())):
            yield position


class Conditions(NamedTuple):
    """Conditions of a mask mod.

    Args:
        tokens: conditions in postfix: comparisons like ``ge s32``, which take two operands,
            ``bool``, which takes one, and ``kv_idx ge``, which takes a bound; and ``and``, ``or``,
            ``xor``, ``not``.
        operands: operands in the order in which tokens take them.
    """

    tokens: tuple[str, ...]
    operands: tuple[Operand | Bound, ...]


def conditions_of(
    nodes: Sequence[Node],
    output: int,
    needs: Mapping[Node, Collection[str]],
    ranges: Mapping[Node, tuple[int, int]],
) -> Conditions | None:
    """Return a mask mod's conditions, or None where a single select is enough.

    Args:
        nodes, output: of its graph, simplified.
        needs: which inputs that differ within a tile each node needs.
        ranges: (least, largest) value of integers, where they are known.
    """
    tokens: list[str] = []
    operands: list[Operand | Bound] = []

    def walk(position: int) -> None:
        node = nodes[position]
        of_bools = all(nodes[a].dtype is torch.bool for a in node.arguments)
        if node.operation in _JOINS and of_bools:
            for argument in node.arguments:
                walk(argument)
            tokens.append(node.operation)
        elif node.operation in _COMPARISONS and not of_bools:
            compare(node)
        else:
            tokens.append("bool")
            operands.append(Operand(position, "int32"))

    def compare(node: Node) -> None:
        left, right = node.arguments
        for one, other, operation in (
            (left, right, node.operation),
            (right, left, _SWAPPED[node.operation]),
        ):
            found = _bound(nodes, one, other, needs, ranges)
            if found is not None:
                bound, swaps = found
                tokens.append(f"kv_idx {_SWAPPED[operation] if swaps else operation}")
                operands.append(bound)
                return
        type_ = _type(nodes[left], nodes[right], ranges)
        tokens.append(f"{node.operation} {_SHORT[type_]}")
        operands.extend((Operand(left, type_), Operand(right, type_)))

    walk(output)
    if not 2 <= len([token for token in tokens if token not in _JOINS]) <= _MOST:
        return None
    return Conditions(tuple(tokens), tuple(operands))


_SHORT = {"int32": "s32", "int64": "s64", "float32": "f32", "float64": "f64"}


def _type(left: Node, right: Node, ranges: Mapping[Node, tuple[int, int]]) -> str:
    if left.dtype.is_floating_point or right.dtype.is_floating_point:
        return "float64" if torch.float64 in (left.dtype, right.dtype) else "float32"
    limits = torch.iinfo(torch.int32)
    known = [ranges.get(node) for node in (left, right)]
    fits = all(r is not None and limits.min <= r[0] and r[1] <= limits.max for r in known)
    return "int32" if fits else "int64"


def _bound(
    nodes: Sequence[Node],
    one: int,
    other: int,
    needs: Mapping[Node, Collection[str]],
    ranges: Mapping[Node, tuple[int, int]],
) -> tuple[Bound, bool] | None:
    """Return (right-hand side, whether the comparison is mirrored) where `one` is kv_idx or
    -kv_idx plus nodes that don't depend on it, and `other` doesn't depend on it, else None."""
    if nodes[one].dtype is not torch.int64 or nodes[other].dtype.is_floating_point:
        return None
    terms = _sum(nodes, one, 1, ranges)
    mine = [(p, factor) for p, factor in terms if nodes[p] == _KEY]
    rest = [term for term in terms if term not in mine]
    if len(mine) != 1 or any("kv_idx" in needs[nodes[p]] for p in (other, *(p for p, _ in rest))):
        return None
    # one = sign * kv_idx + rest, so kv_idx is compared with sign * (other - rest).
    ((place, sign),) = mine
    bound = [(p, factor * sign) for p, factor in _sum(nodes, other, 1, ranges)]
    bound += [(p, -factor * sign) for p, factor in rest]
    small = [(p, factor) for p, factor in bound if _size(nodes[p], ranges) < _LARGEST_INDEX]
    large = [term for term in bound if term not in small]
    largest = max(sum(_size(nodes[p], ranges) for p, _ in small), _size(nodes[place], ranges))
    if len(large) > 1 or largest >= _LARGEST_INDEX:
        return None
    return Bound(tuple(small), large[0] if large else None), sign < 0


def _size(node: Node, ranges: Mapping[Node, tuple[int, int]]) -> int:
    return max(map(abs, ranges.get(node, (0, 1 << 63))))


def _sum(
    nodes: Sequence[Node], position: int, factor: int, ranges: Mapping[Node, tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the terms (position, factor) of a node. A sum that may have wrapped stays one term;
    an int64 whose range is known hasn't wrapped."""
    node = nodes[position]
    if node.operation in ("add", "sub") and node.dtype is torch.int64 and node in ranges:
        left, right = node.arguments
        second = factor if node.operation == "add" else -factor
        return [*_sum(nodes, left, factor, ranges), *_sum(nodes, right, second, ranges)]
    return [(position, factor)]
