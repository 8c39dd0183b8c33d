"""The analysis of a mask graph: what holds for every element of a cell, for many cells at once.

Abstract interpretation on intervals (Cousot and Cousot, 1977) of a scalar graph, with three
additions that make masks decidable: affine forms, so that equal terms cancel; "attained" ranges,
so that a cell all of whose blocks are mixed is settled without looking into them; and relabelled
equality of reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anyflex.intervals.affine import AffineForm, affine_form
from anyflex.intervals.batched_bools import both, inverse
from anyflex.intervals.captured_read_ranges import load_range, load_verdict
from anyflex.intervals.cells import Cells
from anyflex.intervals.evaluation import Domain, Evaluation, GraphFacts, Rules, spread
from anyflex.intervals.floats import FLOAT_RULES
from anyflex.intervals.integers import INTEGER_RULES
from anyflex.intervals.read_equality import ReadEquality, read_equality
from anyflex.intervals.three_valued_logic import BOOL_RULES
from anyflex.mod_graph.dtypes import type_class
from anyflex.mod_graph.graph import ModGraph
from anyflex.mod_graph.operations.bounds import End

__all__ = ["Analysis"]

_RULES = Rules(load_range, load_verdict, INTEGER_RULES, FLOAT_RULES, BOOL_RULES)
_LARGEST = 1 << 60
"""Largest integer that is followed, so that bounds in int64 never wrap."""


class Analysis(GraphFacts):
    """A mask graph on a domain; arguments of `GraphFacts`."""

    def __init__(self, graph: ModGraph, captured: Sequence[Tensor], domain: Domain) -> None:
        super().__init__(graph, captured, domain)
        self._equalities: dict[int, ReadEquality | None] = {}
        self._bound()

    def evaluation(self, cells: Cells, *, static: bool = False) -> Evaluation:
        """Return one pass over the graph; arguments of `Evaluation`."""
        return Evaluation(self, _RULES, cells, static=static)

    def verdict(self, cells: Cells) -> tuple[Tensor, Tensor, Tensor]:
        """Return where the mask is true, false, mixed (`Verdict`), as bool tensors [n].

        All are false where an element that may be live may read outside of a captured tensor.
        """
        evaluation = self.evaluation(cells)
        true, false, mixed = evaluation.nested(evaluation.verdict, self.output)
        mixed = both(mixed, inverse(true), inverse(false))
        inside = evaluation.inside
        return (
            spread(both(true, inside), cells.count),
            spread(false, cells.count),
            spread(both(mixed, inside), cells.count),
        )

    def undecided(self, cells: Cells) -> int | None:
        """Return the first bool node, in evaluation order, that some cell leaves undecided."""
        evaluation = self.evaluation(cells)
        evaluation.nested(evaluation.verdict, self.output)
        return evaluation.first_undecided()

    def equality(self, position: int) -> ReadEquality | None:
        """Return the equality of two reads that a comparison is, or None."""
        if position not in self._equalities:
            left, right = self.nodes[position].arguments
            self._equalities[position] = read_equality(self, left, right)
        return self._equalities[position]

    def _bound(self) -> None:
        """Compute the range of each integer node over the whole domain, in exact Python ints."""
        domain = self.domain
        (q_length, kv_length), (q_block, kv_block) = domain.lengths, domain.block_size
        everything = Cells(1, 0, 0, 0, q_length - 1, 0, kv_length - 1, q_block, kv_block)
        evaluation = self.evaluation(everything, static=True)
        for position, node in enumerate(self.nodes):
            if type_class(node.dtype) != "int":
                continue
            self.forms[position] = AffineForm(0, ((position, 1),))
            found = evaluation.nested(evaluation.range, position)
            if found is None or not _fits(found.low, found.high, node.dtype):
                # Later nodes must not see the range that it would have without wrapping.
                evaluation.settle(position, None)
                self.forms[position] = None
                continue
            self.ranges[position] = found
            form = affine_form(self.nodes, position, self.forms)
            if self._size(form) <= _LARGEST:
                self.forms[position] = form
                if not form.is_atom(position):
                    # Terms that cancel make the range narrower.
                    found = evaluation.form_range(form)
                    evaluation.settle(position, found)
                    self.ranges[position] = found

    def _size(self, form: AffineForm) -> int:
        """Return a bound of every partial sum of a form."""
        total = abs(form.constant)
        for atom, coefficient in form.terms:
            range_ = self.ranges[atom]
            if range_ is None:
                return _LARGEST + 1
            total += abs(coefficient) * max(abs(int(range_.low)), abs(int(range_.high)))
        return total


def _fits(low: End, high: End, dtype: torch.dtype) -> bool:
    """Whether an integer type holds a range of Python ints, and the range is followed."""
    limits = torch.iinfo(dtype)
    return bool(low >= max(limits.min, -_LARGEST)) and bool(high <= min(limits.max, _LARGEST))
