"""Labels for the ids that a mask compares: any labels will do that keep different ids different.

Ids that ascend are their own labels. Where no id comes back after another one, as in packed
documents, there are labels that ascend: where each id is, or how many runs of equal ids came
before. Otherwise ids are labelled in the order of their first appearance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anyflex.intervals.batched_bools import Flag
from anyflex.intervals.tables import (
    RowTable,
    SegmentTable,
    SortedTable,
    is_ascending,
    segment_heads,
    spread_segments,
)

__all__ = ["Labels", "Segments", "relabelled"]

_MOST_KEY = 1 << 62
_SPARSE = 8
"""Ids get a slot each, rather than being sorted, where they span up to this times their number."""
_FEW = 1 << 16
"""Elements up to which all are labelled at once, and whether ids ascend makes no difference."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Heads of the runs of equal values of rows [R, N], and the label of each run.

    Args:
        heads: flat positions, int64 [segments].
        labels: int32 [segments].
    """

    heads: Tensor
    labels: Tensor

    def spread(self, shape: torch.Size) -> Tensor:
        """Return the label of each element, int32 of `shape`."""
        segment = spread_segments(self.heads, shape.numel())
        return self.labels.index_select(0, segment).view(shape)


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of the q and of the kv side.

    Args:
        tables: of the labels, for lookups by ranges of positions.
        segments: of both sides, where `count` is a number.
        count: largest number of labels in a row; None where they ascend, because sets of labels
            would decide no more than ranges do.
        heads: of the segments of both sides, where their numbers are the labels.
    """

    tables: tuple[RowTable, RowTable]
    segments: tuple[Segments, Segments] | None
    count: int | None
    heads: Tensor | None = None


class _NumberedSegments:
    """The segments of rows [R, N], each labelled by its number; no table until one is needed."""

    def __init__(self, heads: Tensor, shape: torch.Size) -> None:
        self._heads = heads
        self._shape = shape
        self._table: SegmentTable | None = None

    def look_up(self, row: Tensor | int, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Flag]:
        """See `RowTable`."""
        if self._table is None:
            numbers = torch.arange(self._heads.numel(), device="cpu")
            self._table = SegmentTable(self._heads, numbers, self._shape)
        return self._table.look_up(row, low, high)


def relabelled(
    rows: Sequence[Tensor], bounds: tuple[Tensor, Tensor] | None, *, by_row: bool
) -> Labels:
    """Label the values of two tables.

    Args:
        rows: [R, N] of the q and of the kv side, integers; the second may be the first.
        bounds: where they are one: its smallest and largest value, 0-d.
        by_row: only equal rows are compared, so that they may have labels of their own.
    """
    if bounds is not None and rows[0].numel() <= _FEW:
        places = _places(rows[0], bounds, by_row=by_row)
        if places is not None:
            table = SortedTable(places)
            return Labels((table, table), None, None)
    distinct = rows[:1] if rows[0] is rows[1] else rows
    if all(is_ascending(values) for values in distinct):
        return Labels((SortedTable(rows[0]), SortedTable(rows[1])), None, None)
    heads = [segment_heads(values) for values in distinct]
    values = [v.reshape(-1).index_select(0, h) for v, h in zip(distinct, heads, strict=True)]
    if bounds is not None:
        row = heads[0] // rows[0].shape[1] if by_row else None
        if _all_differ(values[0], row, bounds):
            numbered = _NumberedSegments(heads[0], rows[0].shape)
            return Labels((numbered, numbered), None, None, heads[0])
    found, count = _by_appearance(heads, values, [v.shape[1] for v in distinct], by_row=by_row)
    cut = [
        SegmentTable(one.heads, one.labels, v.shape)
        for one, v in zip(found, distinct, strict=True)
    ]
    tables = (cut[0], cut[-1])
    if all(table.ascending for table in cut):
        return Labels(tables, None, None)
    return Labels(tables, (found[0], found[-1]), count)


def _places(values: Tensor, bounds: tuple[Tensor, Tensor], *, by_row: bool) -> Tensor | None:
    """Label each element of [R, N] by one position of its id, int32 of the same shape.

    None where ids are too sparse, or where the labels of a row decrease, because an id comes back
    after another one.
    """
    low, high = (int(bound) for bound in bounds)
    span, rows = high - low + 1, values.shape[0] if by_row else 1
    if rows * span > _SPARSE * values.numel():
        return None
    key = values.to(torch.int64)
    if low:
        key = key - low
    if rows > 1:
        key = key + torch.arange(0, rows * span, span, device="cpu")[:, None]
    key = key.reshape(-1)
    place = torch.empty(rows * span, dtype=torch.int32, device="cpu")
    # Any of an id's positions will do.
    place.scatter_(0, key, torch.arange(key.numel(), dtype=torch.int32, device="cpu"))
    labels = place.index_select(0, key).view(values.shape)
    length = values.shape[1] - 1
    ascends = (labels.narrow(1, 1, length) >= labels.narrow(1, 0, length)).all()
    return labels if bool(ascends) else None


def _all_differ(values: Tensor, row: Tensor | None, bounds: tuple[Tensor, Tensor]) -> bool:
    """Whether no value occurs twice in integers [n], or in one of their rows [n]."""
    low, high = (int(bound) for bound in bounds)
    span = high - low + 1
    rows = 1 if row is None else int(row[-1]) + 1
    if rows * span > _MOST_KEY:
        return False
    key = values.to(torch.int64) - low
    if row is not None:
        key += row * span
    if rows * span <= _SPARSE * key.numel():
        return int(torch.bincount(key).amax()) == 1
    key = key.sort()[0]
    return not bool((key[1:] == key[:-1]).any())


def _by_appearance(
    heads: list[Tensor], values: list[Tensor], lengths: list[int], *, by_row: bool
) -> tuple[list[Segments], int]:
    """Label segments in the order in which their values appear first.

    Args:
        heads, values: of each table's segments.
        lengths: of the tables' rows.
        by_row: see `relabelled`.

    Returns:
        The segments of each table and how many labels there are, in the row that has the most.
    """
    _, group = torch.unique(torch.cat(values), return_inverse=True)
    row = torch.zeros_like(group)
    if by_row:
        row = torch.cat([h // length for h, length in zip(heads, lengths, strict=True)])
        _, group = torch.unique(row * group.numel() + group, return_inverse=True)
    total = int(group.amax()) + 1
    appearance = torch.full((total,), group.numel(), dtype=torch.int64, device="cpu")
    places = torch.arange(group.numel(), device="cpu")
    appearance.scatter_reduce_(0, group, places, "amin")
    # Labels begin anew in each row: with fewer labels, more masks are exact.
    row_of = row[appearance]
    order = (row_of * group.numel() + appearance).argsort()
    counts = torch.bincount(row_of)
    first = (counts.cumsum(0) - counts)[row_of[order]]
    label = torch.empty(total, dtype=torch.int32, device="cpu")
    label[order] = (torch.arange(total, device="cpu") - first).to(torch.int32)
    parts = torch.split(label[group], [h.numel() for h in heads])
    return [Segments(h, part) for h, part in zip(heads, parts, strict=True)], int(counts.amax())
