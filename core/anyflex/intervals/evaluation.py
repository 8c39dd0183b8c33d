"""Evaluation of a mask graph on cells: ranges and verdicts of its nodes, by rules handed in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from anyflex.intervals.affine import AffineForm
from anyflex.intervals.batched_bools import Flag, both, either
from anyflex.intervals.bounds import Range, Verdict, tensor_of
from anyflex.intervals.cells import Cells
from anyflex.intervals.tables import CapturedTables
from anyflex.mod_graph.dtypes import type_class
from anyflex.mod_graph.evaluate import Evaluator
from anyflex.mod_graph.graph import ModGraph
from anyflex.mod_graph.node import Node
from anyflex.mod_graph.operations import RECORDS
from anyflex.mod_graph.operations.bounds import End

__all__ = ["Domain", "Equality", "Evaluation", "GraphFacts", "Rules", "spread"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Domain:
    """Domain of a mask: indices b, h, q_idx, kv_idx below these sizes, none of them 0.

    Args:
        batch, heads: sizes.
        lengths, block_size: (q, kv), in elements.
    """

    batch: int
    heads: int
    lengths: tuple[int, int]
    block_size: tuple[int, int]


class Equality(Protocol):
    """The equality of two reads."""

    def verdict(self, evaluation: Evaluation, /) -> Verdict | None:
        """Return the verdict in the evaluation's cells."""
        ...


class Rules(NamedTuple):
    """Rule of each operation for ranges of numbers and verdicts of bools; the result of an
    operation without a rule is unknown."""

    load_range: Callable[[Evaluation, Node], Range | None]
    load_verdict: Callable[[Evaluation, Node], Verdict]
    integers: Mapping[str, Callable[[Evaluation, Node], Range | None]]
    floats: Mapping[str, Callable[[Evaluation, Node], Range | None]]
    bools: Mapping[str, Callable[[Evaluation, Node, int], Verdict]]


class GraphFacts:
    """Facts about a mask graph's nodes over its whole domain.

    Args:
        graph: simplified, its numbers bound to constants.
        captured: the tensors that its loads index, on the CPU.
    """

    def __init__(self, graph: ModGraph, captured: Sequence[Tensor], domain: Domain) -> None:
        self.nodes = graph.nodes
        self.output = graph.output
        self.domain = domain
        self.tables = CapturedTables(captured)
        self.moving: list[frozenset[str]] = []
        """Indices among q_idx and kv_idx that each node depends on."""
        for node in self.nodes:
            here = {str(node.attribute)} & {"q_idx", "kv_idx"} if node.operation == "input" else ()
            self.moving.append(frozenset(here).union(*(self.moving[a] for a in node.arguments)))
        self._approximate: list[bool] = []
        """Whether the last bits of a node's value may depend on how many are computed together."""
        for node in self.nodes:
            operands = any(self._approximate[a] for a in node.arguments)
            self._approximate.append(operands or RECORDS[node.operation].approximate)
        self.forms: list[AffineForm | None] = [None] * len(self.nodes)
        self.ranges: list[Range | None] = [None] * len(self.nodes)
        """Range of each integer node over the whole domain, as Python ints; None if it is unknown,
        or if the node may wrap."""
        self._differences: dict[tuple[int, int], AffineForm] = {}
        self._fixed: dict[int, Evaluator] = {}
        self._captured = list(captured)

    def unknown(self, position: int) -> bool:
        """Whether nothing is known of an integer node."""
        return self.ranges[position] is None

    def input(self, name: str) -> int:
        """Return the position of an index, or -1."""
        for position, node in enumerate(self.nodes):
            if node.operation == "input" and node.attribute == name:
                return position
        return -1

    def equality(self, position: int) -> Equality | None:
        """Return the equality of two reads that a comparison is, or None."""
        raise NotImplementedError

    def difference(self, left: int, right: int) -> AffineForm | None:
        """Return the form of left - right, or None where one of them is unknown."""
        x, y = self.forms[left], self.forms[right]
        if x is None or y is None:
            return None
        form = self._differences.get((left, right))
        if form is None:
            form = self._differences[left, right] = x.plus(y, -1)
        return form

    def is_fixed(self, position: int) -> bool:
        """Tell whether a node has one exact value a cell, whatever q_idx and kv_idx are."""
        return not self.moving[position] and not self._approximate[position]

    def fixed(self, position: int, b: End, h: End) -> tuple[Tensor, Flag]:
        """Return the exact value of a node that doesn't depend on q_idx and kv_idx, and where its
        reads stay inside their captured tensors."""
        if position not in self._fixed:
            self._fixed[position] = Evaluator(self.nodes, (position,))
        inputs = {"b": tensor_of(b), "h": tensor_of(h)}
        outside: list[tuple[int, Tensor]] = []
        (value,) = self._fixed[position](inputs, self._captured, (), (), outside)
        return value, both(*(~where for _, where in outside))


class Evaluation:
    """One pass over the graph for given cells.

    Args:
        rules: those of each operation for ranges and verdicts.
        static: the cell is the whole domain and all ends of integers are Python ints.

    Attributes:
        inside: where no read leaves its captured tensor.
    """

    def __init__(
        self, facts: GraphFacts, rules: Rules, cells: Cells, *, static: bool = False
    ) -> None:
        self.facts = facts
        self.rules = rules
        self.nodes = facts.nodes
        self.cells = cells
        self.static = static
        self.inside: Flag = True
        self._range_of: dict[int, Range | None] = {}
        self._verdict_of: dict[int, Verdict] = {}

    def range(self, position: int) -> Range | None:
        """Return the range of a number, None where it is unknown."""
        if position not in self._range_of:
            self._range_of[position] = self._range(position)
        return self._range_of[position]

    def settle(self, position: int, range_: Range | None) -> None:
        """Set the result of `range` from now on."""
        self._range_of[position] = range_

    def verdict(self, position: int) -> Verdict:
        """Return the verdict of a bool."""
        if position not in self._verdict_of:
            self._verdict_of[position] = self._verdict(position)
        return self._verdict_of[position]

    def nested(self, look: Callable[[int], T], position: int) -> T:
        """Return `look(position)`. Where a node's operands are nested more deeply than Python's
        calls may be, all nodes before it are looked at first, in their order."""
        try:
            return look(position)
        except RecursionError:
            for before, node in enumerate(self.nodes[:position]):
                (self.verdict if type_class(node.dtype) == "bool" else self.range)(before)
            return look(position)

    def first_undecided(self) -> int | None:
        """Return the first node looked at that has no verdict in some cell."""
        for position, verdict in sorted(self._verdict_of.items()):
            if not bool(spread(either(*verdict), self.cells.count).all()):
                return position
        return None

    def difference(self, left: int, right: int) -> Range | None:
        """Return the range of left - right, of two integers."""
        form = self.facts.difference(left, right)
        return None if form is None else self.form_range(form)

    def form_range(self, form: AffineForm) -> Range | None:
        """Return the range of a form, None where an atom's is unknown."""
        low: End = form.constant
        high: End = form.constant
        attained: Flag = True
        seen: frozenset[str] = frozenset()
        for atom, coefficient in form.terms:
            found = self.range(atom)
            if found is None:
                return None
            moving = self.facts.moving[atom]
            if coefficient == 1:
                low, high = low + found.low, high + found.high
            elif coefficient == -1:
                low, high = low - found.high, high - found.low
            else:
                ends = (found.low, found.high) if coefficient > 0 else (found.high, found.low)
                low, high = low + coefficient * ends[0], high + coefficient * ends[1]
            # Sums of independent attained ranges are attained, multiples are not.
            steps = not moving or (abs(coefficient) == 1 and not moving & seen)
            attained = both(attained, found.attained, steps)
            seen |= moving
        return Range(low, high, attained)

    def moving(self, position: int) -> bool:
        """Tell whether a node depends on q_idx or kv_idx."""
        return bool(self.facts.moving[position])

    def independent(self, left: int, right: int) -> bool:
        """Tell whether no index moves both nodes."""
        return not self.facts.moving[left] & self.facts.moving[right]

    def fixed(self, position: int) -> Tensor:
        """Return the exact value of a node that doesn't move, 0-d or one a cell."""
        value, inside = self.facts.fixed(position, self.cells.b, self.cells.h)
        self.must_stay_inside(inside)
        return value

    def must_stay_inside(self, inside: Flag) -> None:
        """Note where a read stays inside its captured tensor."""
        self.inside = both(self.inside, inside)

    def covers(self, position: int, divisor: End) -> Flag:
        """Tell where, in every block of a cell, a node takes every remainder of `divisor`.

        It does where the step of an index is coprime to the divisor, and blocks are long enough.
        """
        form = self.facts.forms[position]
        if form is None:
            return False
        sides = {"q_idx": self.cells.q_unit, "kv_idx": self.cells.kv_unit}
        for name, side in sides.items():
            place = self.facts.input(name)
            steps = dict(form.terms)
            step = abs(steps.pop(place, 0))
            coprime = step == 1 or (isinstance(divisor, int) and math.gcd(step, divisor) == 1)
            if coprime and not any(name in self.facts.moving[atom] for atom in steps):
                covered: Flag = side >= divisor
                if covered is not False:
                    return covered
        return False

    def _range(self, position: int) -> Range | None:
        node = self.nodes[position]
        is_float = node.dtype.is_floating_point
        if node.operation == "const":
            if is_float:
                value = torch.tensor(node.attribute, dtype=node.dtype, device="cpu")
                return Range(value, value)
            assert isinstance(node.attribute, int)
            number = int(node.attribute)
            return Range(number, number, True)
        if not self.static and not is_float and self.facts.unknown(position):
            return None
        if node.operation == "input":
            return self._input(str(node.attribute))
        if not self.static and self.facts.is_fixed(position):
            value = self.fixed(position)
            if is_float:
                return Range(value, value)
            value = value.to(torch.int64)
            return Range(value, value, True)
        form = self.facts.forms[position]
        if form is not None and not form.is_atom(position):
            return self.form_range(form)
        if node.operation == "detach":
            return self.range(node.arguments[0])
        if node.operation == "load":
            return self.rules.load_range(self, node)
        rule = (self.rules.floats if is_float else self.rules.integers).get(node.operation)
        return None if rule is None else rule(self, node)

    def _input(self, name: str) -> Range | None:
        cells, domain = self.cells, self.facts.domain
        if name == "q_idx":
            return Range(cells.q_low, cells.q_high, cells.q_high - cells.q_low + 1 == cells.q_unit)
        if name == "kv_idx":
            return Range(
                cells.kv_low, cells.kv_high, cells.kv_high - cells.kv_low + 1 == cells.kv_unit
            )
        if name in ("b", "h"):
            if self.static:
                return Range(0, (domain.batch if name == "b" else domain.heads) - 1)
            point = cells.b if name == "b" else cells.h
            return Range(point, point, True)
        return None

    def _verdict(self, position: int) -> Verdict:
        node = self.nodes[position]
        if node.operation == "const":
            return Verdict(bool(node.attribute), not node.attribute)
        if not self.static and self.facts.is_fixed(position):
            value = self.fixed(position)
            return Verdict(value, ~value)
        if node.operation == "detach":
            return self.verdict(node.arguments[0])
        if node.operation == "load":
            return self.rules.load_verdict(self, node)
        rule = self.rules.bools.get(node.operation)
        return Verdict() if rule is None else rule(self, node, position)


def spread(flag: Flag, count: int) -> Tensor:
    if isinstance(flag, Tensor):
        return flag.expand(count)
    return torch.full((count,), flag, device="cpu")
