"""Equality of two reads, ``doc[q] == doc[k]``: the mask of packed documents and segments.

Ranges of labels decide them (`relabelling`) wherever each document is in one piece. Where labels
do not ascend, the set of labels of each block, as bits, tells whether any pair is equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anyflex.intervals.batched_bools import Flag, both
from anyflex.intervals.block_bounds import BlockEnds
from anyflex.intervals.bounds import Verdict, tensor_of
from anyflex.intervals.captured_read_ranges import bounded_range, fixed_row
from anyflex.intervals.evaluation import Evaluation, GraphFacts
from anyflex.intervals.id_labels import Segments, relabelled
from anyflex.intervals.tables import RowTable
from anyflex.mod_graph.dtypes import type_class
from anyflex.mod_graph.node import Node
from anyflex.mod_graph.operations.bounds import lesser

__all__ = ["ReadEquality", "read_equality"]

_MOST_LABELS = 4096
"""Maximum number of labels with a bit each. Beyond it two labels may share a bit: then only "no
pair" can be decided."""
_SET_WORDS = 1 << 19
"""Number of words of sets that are compared at once."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two reads: its node, the table of its labels, and its captured tensor [R, N].

    Where labels ascend `segments` is None: nothing asks for them.
    """

    node: Node
    table: RowTable
    rows: Tensor
    segments: Segments | None


class ReadEquality:
    """``captured[..., i] == captured[..., j]`` with i moving along q and j along kv."""

    def __init__(self, facts: GraphFacts, q_node: Node, kv_node: Node) -> None:
        nodes = (q_node, kv_node)
        rows = [_rows(facts, node) for node in nodes]
        if q_node.attribute == kv_node.attribute:
            rows[1] = rows[0]
        # Their shapes must be equal, or the same indices choose different rows.
        shapes = [facts.tables.captured[_position(node)].shape[:-1] for node in nodes]
        by_row = q_node.arguments[:-1] == kv_node.arguments[:-1] and (
            shapes[0] == shapes[1] and rows[0].shape[0] > 1
        )
        same = rows[0] is rows[1]
        bounds = facts.tables.whole(_position(q_node)) if same else None
        labels = relabelled(rows, bounds, by_row=by_row)
        self._count = labels.count
        segments = labels.segments or (None, None)
        self._q, self._kv = map(_Side, nodes, labels.tables, rows, segments)
        self._domain = domain = facts.domain
        self._sets: tuple[_BlockSets, _BlockSets] | None = None
        inputs = (facts.input("q_idx"), facts.input("kv_idx"))
        forms = [facts.forms[node.arguments[-1]] for node in nodes]
        self._by_position = all(
            form is not None and form.is_atom(position)
            for form, position in zip(forms, inputs, strict=True)
        )
        self._ends: list[BlockEnds] | None = None
        """Read instead of the tables where cells are whole blocks."""
        if self._by_position and labels.heads is not None:
            wanted = list(zip(domain.lengths, domain.block_size, strict=True))
            made = {pair: BlockEnds(labels.heads, rows[0].shape, *pair) for pair in set(wanted)}
            self._ends = [made[pair] for pair in wanted]

    def verdict(self, evaluation: Evaluation) -> Verdict | None:
        """Return the verdict of the equality; None where an index may leave its tensor."""
        found = []
        tables: Sequence[RowTable] = (self._q.table, self._kv.table)
        if self._ends is not None and evaluation.cells.whole:
            tables = self._ends
        for side, table in zip((self._q, self._kv), tables, strict=True):
            index = evaluation.range(side.node.arguments[-1])
            if index is None:
                return None
            low, high, _, kept = bounded_range(index, side.rows.shape[1])
            row, inside = fixed_row(evaluation, side.node, (len(side.node.arguments) - 1,))
            if kept is not True or inside is not True:
                return None
            found.append((row, *table.look_up(row, low, high)[:2], low, high))
        (q_row, a, b, _, _), (kv_row, c, d, _, _) = found
        true = (a == b) & (c == d) & (a == c)
        false = (b < c) | (d < a)
        mixed: Flag = False
        if self._by_position and self._count is not None:
            true, false, mixed = self._by_sets(evaluation, q_row, kv_row, true, false)
        return Verdict(true, false, mixed)

    def _by_sets(
        self,
        evaluation: Evaluation,
        q_row: Tensor | int,
        kv_row: Tensor | int,
        true: Tensor,
        false: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decide cells that are one whole block by their sets of labels."""
        cells, (q_block, kv_block) = evaluation.cells, self._domain.block_size
        mixed = torch.zeros_like(true)
        q_length, kv_length = self._domain.lengths
        # Boxes inside a block are left out: elements of the block's sets may lie outside of them.
        whole = both(
            cells.q_low % q_block == 0,
            cells.q_high + 1 == lesser(cells.q_low + q_block, q_length),
            cells.kv_low % kv_block == 0,
            cells.kv_high + 1 == lesser(cells.kv_low + kv_block, kv_length),
        )
        chosen = (whole & ~true & ~false).nonzero().squeeze(1)
        if not chosen.numel():
            return true, false, mixed
        if self._sets is None:
            assert self._count is not None
            assert self._q.segments is not None and self._kv.segments is not None
            q_labels = self._q.segments.spread(self._q.rows.shape)
            kv_labels = self._kv.segments.spread(self._kv.rows.shape)
            # A ragged block owns only the labels inside the lengths.
            self._sets = (
                _BlockSets(q_labels[:, :q_length], q_block, self._count),
                _BlockSets(kv_labels[:, :kv_length], kv_block, self._count),
            )
        q_sets, kv_sets = self._sets
        q_place = q_sets.place(_at(q_row, chosen), tensor_of(cells.q_low)[chosen])
        kv_place = kv_sets.place(_at(kv_row, chosen), tensor_of(cells.kv_low)[chosen])
        some = torch.empty(chosen.numel(), dtype=torch.bool, device="cpu")
        step = max(1, _SET_WORDS // q_sets.words.shape[1])
        for begin in range(0, chosen.numel(), step):
            part = slice(begin, begin + step)
            shared = q_sets.words[q_place[part]] & kv_sets.words[kv_place[part]]
            some[part] = (shared != 0).any(1)
        single = (q_sets.sizes[q_place] == 1) & (kv_sets.sizes[kv_place] == 1)
        true, false = true.clone(), false.clone()
        false[chosen] = ~some
        if q_sets.exact:
            true[chosen] = some & single
            mixed[chosen] = some & ~single
        return true, false, mixed


class _BlockSets:
    """The set of labels of each block of rows [R, N], as bits of words int64 [R * blocks, W]."""

    def __init__(self, labels: Tensor, block: int, count: int) -> None:
        self._block = block
        self.exact = count <= _MOST_LABELS
        bits = min(count, _MOST_LABELS)
        rows, length = labels.shape
        self._blocks = -(-length // block)
        width = -(-bits // 64)
        owner = torch.arange(rows, device="cpu")[:, None] * self._blocks
        owner = owner + torch.arange(length, device="cpu") // block
        key = torch.unique(owner.reshape(-1) * bits + labels.reshape(-1).to(torch.int64) % bits)
        place, label = key // bits, key % bits
        words = torch.zeros(rows * self._blocks * width, dtype=torch.int64, device="cpu")
        words.scatter_add_(0, place * width + label // 64, torch.ones_like(label) << (label % 64))
        self.words = words.view(-1, width)
        self.sizes = torch.bincount(place, minlength=rows * self._blocks)

    def place(self, row: Tensor | int, element: Tensor) -> Tensor:
        """Return the positions of the sets of the blocks that hold these elements."""
        return row * self._blocks + element // self._block


def read_equality(facts: GraphFacts, left: int, right: int) -> ReadEquality | None:
    """Return the equality of two integer nodes if they are reads that it can decide."""
    nodes = [_read_below(facts, position) for position in (left, right)]
    q_node, kv_node = nodes
    if q_node is None or kv_node is None:
        return None
    moving = [facts.moving[node.arguments[-1]] for node in (q_node, kv_node)]
    if moving == [frozenset(("kv_idx",)), frozenset(("q_idx",))]:
        q_node, kv_node = kv_node, q_node
    if any(not facts.tables.captured[_position(n)].numel() for n in (q_node, kv_node)):
        return None
    return ReadEquality(facts, q_node, kv_node)


def _read_below(facts: GraphFacts, position: int) -> Node | None:
    """Return the read that an integer node is, through conversions that change no value, if its
    last index moves and no other does."""
    node = facts.nodes[position]
    while node.operation in ("cast", "detach"):
        # An unknown range: values beyond the type's range wrap, so that different ones may become
        # equal.
        if type_class(node.dtype) != "int" or facts.unknown(position):
            return None
        (position,) = node.arguments
        node = facts.nodes[position]
    if node.operation != "load" or not node.arguments or type_class(node.dtype) != "int":
        return None
    *others, last = node.arguments
    if not facts.moving[last] or any(facts.moving[other] for other in others):
        return None
    return node


def _position(node: Node) -> int:
    assert isinstance(node.attribute, int)
    return node.attribute


def _rows(facts: GraphFacts, node: Node) -> Tensor:
    captured = facts.tables.captured[_position(node)]
    return captured.reshape(-1, captured.shape[-1])


def _at(row: Tensor | int, chosen: Tensor) -> Tensor | int:
    return row[chosen] if isinstance(row, Tensor) and row.dim() else row
