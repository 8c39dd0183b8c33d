"""Block graph: a mask mod's graph evaluated on boxes of elements instead of elements.

A kernel lists the blocks of a step by it from lengths that the device alone knows. It consists of
the operations that every target has for mask mods. Abstract interpretation on intervals (Cousot
and Cousot, 1977), as in `anyflex.intervals`, which knows more, but only for values on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anyflex.mod_graph.box_values import (
    COMPARISONS,
    LOGIC,
    SMALL,
    Range,
    Verdict,
    arithmetic,
    cast_of_bools,
    cast_of_numbers,
    is_nonzero,
    number_where,
)
from anyflex.mod_graph.dtypes import type_class
from anyflex.mod_graph.evaluate import Evaluator
from anyflex.mod_graph.graph import ModGraph
from anyflex.mod_graph.graph_builder import GraphBuilder
from anyflex.mod_graph.integer_ranges import IntegerRange, integer_ranges
from anyflex.mod_graph.node import Attribute, Node
from anyflex.mod_graph.operations import RECORDS
from anyflex.mod_graph.operations.terms import Term, call, where
from anyflex.mod_graph.range_tables import RangeTable
from anyflex.mod_graph.simplify import simplify

__all__ = ["BlockGraph", "block_graph"]

_ENDS = {"q_idx": ("q_low", "q_high"), "kv_idx": ("kv_low", "kv_high")}
_BLOCKS = {"q_idx": "q_block", "kv_idx": "kv_block"}


@dataclass(frozen=True)
class BlockGraph:
    """A mask's graph over a box of at least one element.

    Args:
        graph: its inputs are b and h; q_low, q_high, kv_low and kv_high, both ends included; and,
            where it reads range tables, q_block and kv_block. All are int64, in -2^31..2^31-1. The
            result is int32: 0 no element of the box is live, 1 all are, 2 that isn't known. 0 and
            1 are proofs, if float operations are rounded one by one, as torch does.
        captured: how many of the mask mod's captured tensors stand before the range tables.
        tables: range tables that stand behind them.
    """

    graph: ModGraph
    captured: int
    tables: tuple[RangeTable, ...]

    @functools.cached_property
    def read(self) -> frozenset[str]:
        """Names of the inputs that the result depends on."""
        return frozenset(self.graph.inputs())

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """The graph prepared for torch's operations."""
        return Evaluator(self.graph.nodes, (self.graph.output,))

    def tensors(self, captured: Sequence[Tensor], q_block: int, kv_block: int) -> list[Tensor]:
        """Return the tensors that the graph's loads count into.

        Args:
            captured: the mask mod's.
            q_block, kv_block: elements that each entry of a range table stands for: a tile's rows
                and columns. The inputs of these names must have these values.
        """
        made = [table.made(captured, q_block, kv_block) for table in self.tables]
        return [*captured[: self.captured], *made]


def block_graph(graph: ModGraph) -> BlockGraph:
    """Return the block graph of a mask mod.

    What doesn't move with the query or the key has its own value, whatever it is. For the rest
    there are ranges. They follow integers, unless they may have wrapped, bools, reads of captured
    tensors by one index, and floats as far as all targets round alike. All else makes it 2.

    A box that is all live isn't looked at again: a read outside of a captured tensor isn't noticed
    there.

    Args:
        graph: of a mask mod, simplified.
    """
    pass_ = _Pass(graph)
    true, false = pass_.verdict(graph.output)
    kind = pass_.term("const", torch.int32, attribute=2)
    output = where(false, 0, where(true, 1, kind))
    made = simplify(ModGraph(tuple(pass_.builder.nodes), output.position))
    read = made.loads()
    # Tables that the result doesn't depend on are left out.
    kept = [table for table, at in pass_.tables.items() if at in read]
    places = {pass_.tables[table]: pass_.captured + i for i, table in enumerate(kept)}
    nodes = [
        Node("load", node.dtype, node.arguments, places.get(_position(node), node.attribute))
        if node.operation == "load"
        else node
        for node in made.nodes
    ]
    return BlockGraph(ModGraph(tuple(nodes), made.output), pass_.captured, tuple(kept))


def _position(load: Node) -> int:
    assert isinstance(load.attribute, int)
    return load.attribute


class _Pass:
    """One walk over a mask's graph.

    Args:
        graph: of the mask.
    """

    def __init__(self, graph: ModGraph) -> None:
        self.graph = graph
        self.builder = GraphBuilder()
        self.captured = max(graph.loads(), default=-1) + 1
        self.tables: dict[RangeTable, int] = {}
        self.moving: list[frozenset[str]] = []
        """Indices among q_idx and kv_idx that each node depends on."""
        self.exact: list[Term | None] = []
        """Value of each node that has one for all elements of a box, in its own type."""
        self.found: list[Range | Verdict | None] = []
        indices = IntegerRange(-SMALL, SMALL - 1)
        self.static = integer_ranges(graph.nodes, dict.fromkeys(("b", "h", *_ENDS), indices))
        for node in graph.nodes:
            self.visit(node)

    def term(
        self,
        operation: str,
        dtype: torch.dtype,
        arguments: Sequence[Term] = (),
        attribute: Attribute = None,
    ) -> Term:
        """Append a node."""
        positions = tuple(argument.position for argument in arguments)
        return Term(self.builder, self.builder.add(operation, dtype, positions, attribute))

    def always(self, flag: bool) -> Term:
        """Return a constant bool."""
        return self.term("const", torch.bool, attribute=flag)

    def verdict(self, position: int) -> Verdict:
        """Return what is known of a bool."""
        found = self.found[position]
        return found if isinstance(found, Verdict) else Verdict(*(self.always(False),) * 2)

    def range(self, position: int) -> Range | None:
        """Return what is known of a number."""
        found = self.found[position]
        return found if isinstance(found, Range) else None

    def visit(self, node: Node) -> None:
        """Append what is known of the next node."""
        here = {str(node.attribute)} & set(_ENDS) if node.operation == "input" else ()
        moving = frozenset(here).union(*(self.moving[a] for a in node.arguments))
        exact = None if moving else self.own_value(node)
        self.moving.append(moving)
        self.exact.append(exact)
        if exact is not None:
            self.found.append(self.of_value(node, exact))
        elif moving:
            self.found.append(self.rule(node))
        else:
            self.found.append(None)

    def own_value(self, node: Node) -> Term | None:
        """Return the node itself, unless its last bits depend on how many are computed together,
        or on the target."""
        arguments = [self.exact[a] for a in node.arguments]
        known = [argument for argument in arguments if argument is not None]
        approximate = RECORDS[node.operation].approximate and node.dtype.is_floating_point
        if approximate or len(known) < len(arguments):
            return None
        return self.term(node.operation, node.dtype, known, node.attribute)

    def of_value(self, node: Node, value: Term) -> Range | Verdict:
        """Return what is known of a node by its own value."""
        if node.dtype is torch.bool:
            return Verdict(value, ~value)
        if node.dtype.is_floating_point:
            size = abs(node.value) if node.operation == "const" else math.inf
            return Range(value, value, value.test("eq", value), -size, size)
        if node.operation == "const":
            number = int(node.value)
            value = self.term("const", torch.int64, attribute=number)
            return Range(value, value, self.always(True), number, number)
        limits = torch.iinfo(node.dtype)
        least, most = self.static[len(self.found)] or (limits.min, limits.max)
        end = value.cast(torch.int64)
        return Range(end, end, self.always(True), least, most)

    def rule(self, node: Node) -> Range | Verdict | None:
        """Return what is known of a node that moves."""
        if node.operation == "input":
            low, high = (
                self.term("input", torch.int64, attribute=end)
                for end in _ENDS[str(node.attribute)]
            )
            return Range(low, high, self.always(True), -SMALL, SMALL - 1)
        if node.operation == "load":
            return self.read(node)
        kinds = [type_class(self.graph.nodes[a].dtype) for a in node.arguments]
        if node.operation == "where" and node.dtype is not torch.bool:
            return self.number_where(node)
        if set(kinds) == {"bool"}:
            if node.dtype is torch.bool:
                return LOGIC[node.operation](*(self.verdict(a) for a in node.arguments))
            assert node.operation == "cast"
            return cast_of_bools(self.verdict(node.arguments[0]), node.dtype)
        ranges = [self.range(a) for a in node.arguments]
        known = [range_ for range_ in ranges if range_ is not None]
        if len(known) < len(ranges):
            return None
        if node.operation in COMPARISONS:
            return COMPARISONS[node.operation](*known)
        if node.operation == "detach":
            return known[0]
        if node.operation == "cast":
            if node.dtype is torch.bool:
                return is_nonzero(known[0])
            source = self.graph.nodes[node.arguments[0]].dtype
            return cast_of_numbers(known[0], source, node.dtype)
        return arithmetic(node, known)

    def number_where(self, node: Node) -> Range | None:
        """Return the range of a selection; what isn't selected may be unknown."""
        condition, first, second = node.arguments
        x, y = self.range(first), self.range(second)
        either = x if x is not None else y
        if either is None:
            return None
        unknown = either._replace(known=self.always(False))
        return number_where(self.verdict(condition), x or unknown, y or unknown)

    def read(self, node: Node) -> Range | Verdict | None:
        """Return what is known of a read by an index that moves, and others that don't."""
        moving = [d for d, a in enumerate(node.arguments) if self.moving[a]]
        dimension = moving[0]
        index = self.range(node.arguments[dimension])
        names = self.moving[node.arguments[dimension]]
        others = [self.exact[a] for d, a in enumerate(node.arguments) if d != dimension]
        if index is None or len(names) > 1 or any(other is None for other in others):
            return None
        table = RangeTable(_position(node), dimension, _BLOCKS[next(iter(names))])
        place = self.tables.setdefault(table, self.captured + len(self.tables))
        block = self.term("input", torch.int64, attribute=table.block)

        def entry(captured: int, at: Term, *side: Term) -> Term:
            indices = [other for other in others if other is not None]
            indices.insert(dimension, at)
            return self.term("load", node.dtype, (*side, *indices), captured)

        # An index that leaves the tensor at its end clamps, and so does its entry; negative ones
        # count from the end.
        first, last = index.low // block, index.high // block
        one = index.low.test("eq", index.high)
        known = index.known & (one | ((index.low >= 0) & (last - first <= 1)))
        smaller, larger = ("and", "or") if node.dtype is torch.bool else ("minimum", "maximum")
        own = entry(_position(node), index.low)
        low, high = (
            where(one, own, call(joined, entry(place, first, side), entry(place, last, side)))
            for joined, side in (
                (smaller, self.term("const", torch.int64, attribute=0)),
                (larger, self.term("const", torch.int64, attribute=1)),
            )
        )
        if node.dtype is torch.bool:
            return Verdict(low & known, ~high & known)
        if node.dtype.is_floating_point:
            not_nan = low.test("eq", low)
            return Range(low, high, known & not_nan, -math.inf, math.inf)
        limits = torch.iinfo(node.dtype)
        low, high = low.cast(torch.int64), high.cast(torch.int64)
        return Range(low, high, known, limits.min, limits.max)
