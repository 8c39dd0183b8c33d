"""The analysis of a mask graph: what holds for every element of a cell, for many cells at once.

Abstract interpretation on intervals (Cousot and Cousot, 1977) of a scalar graph, with three
additions that make masks decidable: affine forms, so that equal terms cancel; "attained" ranges,
so that a cell all of whose blocks are mixed is settled without looking into them; and relabelled
equality of reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from anyflex.intervals.affine import AffineForm, affine_form
from anyflex.intervals.batched_bools import Flag, both, either, inverse
from anyflex.intervals.bounds import End, Range, Verdict, tensor_of
from anyflex.intervals.captured_read_ranges import CapturedTables, load_range, load_verdict
from anyflex.intervals.cells import Cells
from anyflex.intervals.floats import APPROXIMATE, FLOAT_RULES
from anyflex.intervals.integers import INTEGER_RULES
from anyflex.intervals.read_equality import ReadEquality, read_equality
from anyflex.intervals.three_valued_logic import BOOL_RULES
from anyflex.mod_graph.evaluate import Evaluator
from anyflex.mod_graph.graph import ModGraph
from anyflex.mod_graph.lowering import type_class

__all__ = ["Analysis", "Domain", "Evaluation"]

T = TypeVar("T")
_LARGEST = 1 << 60
"""Integers beyond are not followed, so that ends in int64 never wrap."""


@dataclass(frozen=True, slots=True)
class Domain:
    """Where a mask is asked for: indices b, h, q_idx, kv_idx below these sizes, none of them 0.

    Args:
        batch, heads: sizes.
        lengths, block_size: (q, kv), in elements.
    """

    batch: int
    heads: int
    lengths: tuple[int, int]
    block_size: tuple[int, int]


class Analysis:
    """A mask graph on a domain.

    Args:
        graph: simplified, its numbers bound to constants.
        captured: what its loads count into, on the CPU.
    """

    def __init__(self, graph: ModGraph, captured: Sequence[Tensor], domain: Domain) -> None:
        self.nodes = graph.nodes
        self.output = graph.output
        self.domain = domain
        self.tables = CapturedTables(captured)
        self.moving: list[frozenset[str]] = []
        """For each node the indices q_idx and kv_idx that it depends on."""
        for node in self.nodes:
            here = {str(node.attribute)} & {"q_idx", "kv_idx"} if node.operation == "input" else ()
            self.moving.append(frozenset(here).union(*(self.moving[a] for a in node.arguments)))
        self._approximate: list[bool] = []
        """Whether the last bits of a node's value may depend on how many are computed."""
        for node in self.nodes:
            operands = any(self._approximate[a] for a in node.arguments)
            self._approximate.append(operands or node.operation in APPROXIMATE)
        self.forms: list[AffineForm | None] = [None] * len(self.nodes)
        self._ranges: list[Range | None] = [None] * len(self.nodes)
        self._differences: dict[tuple[int, int], AffineForm] = {}
        self._equalities: dict[int, ReadEquality | None] = {}
        self._fixed: dict[int, Evaluator] = {}
        self._captured = list(captured)
        self._bound()

    def verdict(self, cells: Cells) -> tuple[Tensor, Tensor, Tensor]:
        """Return where the mask is true, false, mixed (`Verdict`), as bool tensors [n].

        Where an element that may be live may read outside of a captured tensor, nothing is.
        """
        evaluation = Evaluation(self, cells)
        true, false, mixed = evaluation.nested(evaluation.verdict, self.output)
        mixed = both(mixed, inverse(true), inverse(false))
        inside = evaluation.inside
        return (
            _spread(both(true, inside), cells.count),
            _spread(false, cells.count),
            _spread(both(mixed, inside), cells.count),
        )

    def undecided(self, cells: Cells) -> int | None:
        """Return the first bool node, in evaluation order, that some cell leaves open."""
        evaluation = Evaluation(self, cells)
        evaluation.nested(evaluation.verdict, self.output)
        return evaluation.first_undecided()

    def range(self, position: int) -> Range | None:
        """Return the range of an integer node over the whole domain, as Python ints.

        None if nothing is known, or if the node may wrap.
        """
        return self._ranges[position]

    def unknown(self, position: int) -> bool:
        """Tell whether nothing is known of an integer node."""
        return self._ranges[position] is None

    def input(self, name: str) -> int:
        """Return the position of an index, or -1."""
        for position, node in enumerate(self.nodes):
            if node.operation == "input" and node.attribute == name:
                return position
        return -1

    def equality(self, position: int) -> ReadEquality | None:
        """Return the equality of two reads that a comparison is, or None."""
        if position not in self._equalities:
            left, right = self.nodes[position].arguments
            self._equalities[position] = read_equality(self, left, right)
        return self._equalities[position]

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

    def _bound(self) -> None:
        """Find what each integer node may be over the whole domain, in exact Python ints."""
        domain = self.domain
        (q_length, kv_length), (q_block, kv_block) = domain.lengths, domain.block_size
        everything = Cells(1, 0, 0, 0, q_length - 1, 0, kv_length - 1, q_block, kv_block)
        evaluation = Evaluation(self, everything, static=True)
        for position, node in enumerate(self.nodes):
            if type_class(node.dtype) != "int":
                continue
            self.forms[position] = AffineForm(0, ((position, 1),))
            found = evaluation.nested(evaluation.range, position)
            if found is None or not _fits(found.low, found.high, node.dtype):
                # What follows must not see the range that it would have without wrapping.
                evaluation.settle(position, None)
                self.forms[position] = None
                continue
            self._ranges[position] = found
            form = affine_form(self.nodes, position, self.forms)
            if self._size(form) <= _LARGEST:
                self.forms[position] = form
                if not form.is_atom(position):
                    # Terms that cancel make it narrower.
                    found = evaluation.form_range(form)
                    evaluation.settle(position, found)
                    self._ranges[position] = found

    def _size(self, form: AffineForm) -> int:
        """Return a bound of every partial sum of a form."""
        total = abs(form.constant)
        for atom, coefficient in form.terms:
            range_ = self._ranges[atom]
            if range_ is None:
                return _LARGEST + 1
            total += abs(coefficient) * max(abs(int(range_.low)), abs(int(range_.high)))
        return total


class Evaluation:
    """One pass over the graph for given cells.

    Args:
        static: the cell is the whole domain and all ends of integers are Python ints.

    Attributes:
        inside: where no read leaves its captured tensor.
    """

    def __init__(self, analysis: Analysis, cells: Cells, *, static: bool = False) -> None:
        self.analysis = analysis
        self.nodes = analysis.nodes
        self.cells = cells
        self.static = static
        self.inside: Flag = True
        self._range_of: dict[int, Range | None] = {}
        self._verdict_of: dict[int, Verdict] = {}

    def range(self, position: int) -> Range | None:
        """Return the range of a number, None where nothing is known."""
        if position not in self._range_of:
            self._range_of[position] = self._range(position)
        return self._range_of[position]

    def settle(self, position: int, range_: Range | None) -> None:
        """Set what `range` returns from now on."""
        self._range_of[position] = range_

    def verdict(self, position: int) -> Verdict:
        """Return what is known of a bool."""
        if position not in self._verdict_of:
            self._verdict_of[position] = self._verdict(position)
        return self._verdict_of[position]

    def nested(self, look: Callable[[int], T], position: int) -> T:
        """Return `look(position)`. Where a node's operands are nested more deeply than Python's
        calls, all nodes before it are looked at first, in their order."""
        try:
            return look(position)
        except RecursionError:
            for before, node in enumerate(self.nodes[:position]):
                (self.verdict if type_class(node.dtype) == "bool" else self.range)(before)
            return look(position)

    def first_undecided(self) -> int | None:
        """Return the first node looked at that has no verdict in some cell."""
        for position, verdict in sorted(self._verdict_of.items()):
            if not bool(_spread(either(*verdict), self.cells.count).all()):
                return position
        return None

    def difference(self, left: int, right: int) -> Range | None:
        """Return the range of left - right, of two integers."""
        form = self.analysis.difference(left, right)
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
            moving = self.analysis.moving[atom]
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
        return bool(self.analysis.moving[position])

    def independent(self, left: int, right: int) -> bool:
        """Tell whether no index moves both nodes."""
        return not self.analysis.moving[left] & self.analysis.moving[right]

    def fixed(self, position: int) -> Tensor:
        """Return the exact value of a node that doesn't move, 0-d or one a cell."""
        value, inside = self.analysis.fixed(position, self.cells.b, self.cells.h)
        self.must_stay_inside(inside)
        return value

    def must_stay_inside(self, inside: Flag) -> None:
        """Note where a read stays inside its captured tensor."""
        self.inside = both(self.inside, inside)

    def covers(self, position: int, divisor: End) -> Flag:
        """Tell where, in every block of a cell, a node takes every remainder of `divisor`.

        It does where an index steps it by what has no factor in common with the divisor, and
        blocks are long enough.
        """
        form = self.analysis.forms[position]
        if form is None:
            return False
        sides = {"q_idx": self.cells.q_unit, "kv_idx": self.cells.kv_unit}
        for name, side in sides.items():
            place = self.analysis.input(name)
            steps = dict(form.terms)
            step = abs(steps.pop(place, 0))
            coprime = step == 1 or (isinstance(divisor, int) and math.gcd(step, divisor) == 1)
            if coprime and not any(name in self.analysis.moving[atom] for atom in steps):
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
        if not self.static and not is_float and self.analysis.unknown(position):
            return None
        if node.operation == "input":
            return self._input(str(node.attribute))
        if not self.static and self.analysis.is_fixed(position):
            value = self.fixed(position)
            if is_float:
                return Range(value, value)
            value = value.to(torch.int64)
            return Range(value, value, True)
        form = self.analysis.forms[position]
        if form is not None and not form.is_atom(position):
            return self.form_range(form)
        if node.operation == "load":
            return load_range(self, node)
        rule = (FLOAT_RULES if is_float else INTEGER_RULES).get(node.operation)
        return None if rule is None else rule(self, node)

    def _input(self, name: str) -> Range | None:
        cells, domain = self.cells, self.analysis.domain
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
        if not self.static and self.analysis.is_fixed(position):
            value = self.fixed(position)
            return Verdict(value, ~value)
        if node.operation == "load":
            return load_verdict(self, node)
        rule = BOOL_RULES.get(node.operation)
        return Verdict() if rule is None else rule(self, node, position)


def _fits(low: End, high: End, dtype: torch.dtype) -> bool:
    """Tell whether an integer type holds a range of Python ints, and it is followed."""
    limits = torch.iinfo(dtype)
    return bool(low >= max(limits.min, -_LARGEST)) and bool(high <= min(limits.max, _LARGEST))


def _spread(flag: Flag, count: int) -> Tensor:
    if isinstance(flag, Tensor):
        return flag.expand(count)
    return torch.full((count,), flag, device="cpu")
