"""Runs as plain tensors: sorting, merging, expanding and transposing them.

Everything here works on the host. A run list is four int64 vectors of equal length: `row`
(counted through batch, head and row of blocks), `first`, `end` (columns of blocks, end excluded)
and `kind`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "FULL",
    "PARTIAL",
    "RunList",
    "block_count",
    "cut",
    "expand_rows",
    "gathered",
    "joined",
    "merged",
    "pack",
    "padded",
    "runs_of_grid",
    "spread",
    "transpose",
    "unpack",
    "unpack_rows",
]

FULL = 1
"""Every element of the block that lies inside the lengths is live: the mask mod is not applied."""

PARTIAL = 2
"""The mask mod decides each element."""

_FEWEST_RUNS = 2


class RunList(NamedTuple):
    """Runs with the row each belongs to: int64 [n] each, on the CPU."""

    row: Tensor
    first: Tensor
    end: Tensor
    kind: Tensor


def block_count(length: int, block_size: int) -> int:
    """Return how many blocks cover `length`; the last one may be ragged."""
    return -(-length // block_size)


def joined(parts: Iterable[RunList]) -> RunList:
    """Return the runs of all parts, in the order given."""
    none = RunList(*torch.zeros(4, 0, dtype=torch.int64, device="cpu"))
    # An empty part among others would make torch.cat slower.
    return RunList(*(torch.cat(column) for column in zip(*(list(parts) or [none]), strict=True)))


def merged(runs: RunList, columns: int) -> RunList:
    """Sort runs by row and column, and merge neighbours of one kind.

    The runs of a row must be disjoint.
    """
    stride = columns + 1
    key, order = torch.sort(runs.row * stride + runs.first)
    row, first = key // stride, key % stride
    end, kind = runs.end[order], runs.kind[order]
    starts = torch.ones_like(row, dtype=torch.bool)
    starts[1:] = (row[1:] != row[:-1]) | (kind[1:] != kind[:-1]) | (first[1:] != end[:-1])
    begin = starts.nonzero().squeeze(1)
    last = torch.cat([begin[1:], begin.new_tensor([row.numel()])])[: begin.numel()] - 1
    return RunList(row[begin], first[begin], end[last], kind[begin])


def pack(runs: RunList, batch: int, heads: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return `merged` runs and where those of each row begin.

    Returns:
        offsets int32 [batch, heads, rows + 1] and runs int32 [n, 3]: the canonical form.
    """
    row, *fields = merged(runs, columns)
    packed = padded(torch.stack(fields, 1).to(torch.int32))
    total = batch * heads * rows
    counts = torch.bincount(row, minlength=total)
    edges = torch.zeros(total + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(counts, 0, out=edges[1:])
    grids = torch.arange(batch * heads, device="cpu")[:, None]
    position = grids * rows + torch.arange(rows + 1, device="cpu")
    offsets = edges[position].to(torch.int32).view(batch, heads, rows + 1)
    return offsets, packed


def padded(runs: Tensor, rows: int = _FEWEST_RUNS) -> Tensor:
    """Return runs with at least `rows` rows, and at least two: torch.compile makes a graph of its
    own for each of the sizes 0 and 1."""
    missing = max(rows, _FEWEST_RUNS) - runs.shape[0]
    return runs if missing <= 0 else torch.cat([runs, runs.new_zeros(missing, 3)])


def unpack(offsets: Tensor, runs: Tensor) -> RunList:
    """Return the used runs of a canonical form on the CPU, with their rows."""
    flat = offsets.to(torch.int64)
    counts = (flat[..., 1:] - flat[..., :-1]).reshape(-1)
    row = torch.arange(counts.numel(), device="cpu").repeat_interleave(counts)
    used = runs[: row.numel()].to(torch.int64)
    return RunList(row, used[:, 0], used[:, 1], used[:, 2])


def unpack_rows(offsets: Tensor, runs: Tensor) -> RunList:
    """As `unpack` for offsets of some of the rows, which need not be adjacent: int [B', H', rows +
    1], where each grid's rows are. They may be expanded."""
    flat = offsets.to(torch.int64)
    return gathered(flat[..., :-1].reshape(-1), flat[..., 1:].reshape(-1), runs)


def gathered(begins: Tensor, ends: Tensor, runs: Tensor) -> RunList:
    """Return, as runs of row i, ``runs[begins[i]:ends[i]]``; int64 [rows] each."""
    row, inside = spread(ends - begins)
    return RunList(row, *runs[begins[row] + inside].to(torch.int64).unbind(1))


def spread(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return int64 (owner, place): ``counts[i]`` entries of owner i, with places 0, 1, ..."""
    owner = torch.arange(counts.numel(), device="cpu").repeat_interleave(counts)
    place = torch.arange(owner.numel(), device="cpu") - (counts.cumsum(0) - counts)[owner]
    return owner, place


def cut(runs: RunList, columns: int) -> RunList:
    """Return the part of the runs in the first `columns` columns."""
    chosen = (runs.first < columns).nonzero().squeeze(1)
    row, first, end, kind = (field[chosen] for field in runs)
    return RunList(row, first, end.clamp(max=columns), kind)


def runs_of_grid(grid: Tensor, first_row: int) -> RunList:
    """Return the runs of an int8 [rows, columns] grid of kinds, 0 where nothing is visited.

    Args:
        first_row: the number of the grid's first row.
    """
    rows, columns = grid.shape
    edge = torch.zeros(rows, columns + 2, dtype=grid.dtype, device="cpu")
    edge[:, 1:-1] = grid
    # A run of no blocks closes every row, so that each run's end is the next change.
    row, column = (edge[:, 1:] != edge[:, :-1]).nonzero().unbind(1)
    kind = edge[row, column + 1].to(torch.int64)
    begin = kind.nonzero().squeeze(1)
    return RunList(row[begin] + first_row, column[begin], column[begin + 1], kind[begin])


def expand_rows(runs: RunList, rows: int, columns: int) -> Tensor:
    """Return the kinds of `rows` rows as int8 [rows, columns], 0 where no run is."""
    change = torch.zeros(rows, columns + 1, dtype=torch.int8, device="cpu")
    kind = runs.kind.to(torch.int8)
    change.index_put_((runs.row, runs.first), kind, accumulate=True)
    change.index_put_((runs.row, runs.end), -kind, accumulate=True)
    return change.cumsum(1, dtype=torch.int8)[:, :columns]


def transpose(runs: RunList, rows: int, columns: int) -> RunList:
    """Return the same blocks as runs along the columns: O(n log n) in runs read and written.

    A run of column c starts at the rows where c is covered and was not in the row above, and ends
    where the reverse is true. So only the differences of neighbouring rows are looked at, never
    all blocks.

    Args:
        rows, columns: the blocks of one grid.

    Returns:
        Runs whose row is ``grid * columns + column`` and whose first and end count rows.
    """
    return joined(_transpose_kind(runs, kind, rows, columns) for kind in (FULL, PARTIAL))


def _transpose_kind(runs: RunList, kind: int, rows: int, columns: int) -> RunList:
    chosen = runs.kind == kind
    row, first, end = runs.row[chosen], runs.first[chosen], runs.end[chosen]
    # Each grid gets one empty row below its last, which ends every open run.
    here = (row // max(rows, 1) * (rows + 1) + row % max(rows, 1)) * (columns + 1)
    below = here + (columns + 1)
    place = torch.cat([here + first, here + end, below + first, below + end])
    one = torch.ones_like(row)
    place, order = place.sort()
    step = torch.cat([one, -one, -one, one])[order]
    place, group = torch.unique_consecutive(place, return_inverse=True)
    step = torch.zeros_like(place).scatter_add_(0, group, step)
    place = place[step != 0]
    # From each place up to the next one: +1 newly covered, -1 no longer covered, 0 unchanged.
    change = step[step != 0].cumsum(0)
    opened = _columns_between(place, change == 1, rows, columns)
    closed = _columns_between(place, change == -1, rows, columns)
    height = rows + 1
    return RunList(
        opened // height, opened % height, closed % height, torch.full_like(opened, kind)
    )


def _columns_between(place: Tensor, chosen: Tensor, rows: int, columns: int) -> Tensor:
    """Return each (column, row) from chosen places up to the next place, sorted, as one number."""
    index = chosen.nonzero().squeeze(1)
    begin, end = place[index], place[index + 1]
    owner, inside = spread(end - begin)
    at = begin[owner] + inside
    line, column = at // (columns + 1), at % (columns + 1)
    grid, row = line // (rows + 1), line % (rows + 1)
    return ((grid * columns + column) * (rows + 1) + row).sort().values
