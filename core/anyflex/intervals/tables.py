"""Tables that give the smallest and largest value of a captured tensor over a range of indices.

Along one dimension: sorted rows need no table; others are cut into segments of equal values, and a
sparse table over the segments (Bender and Farach-Colton, "The LCA problem revisited", 2000)
answers in two reads. Along two dimensions: a mip map of square tiles, four reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from anyflex.intervals.batched_bools import Flag

__all__ = [
    "CapturedTables",
    "GridTable",
    "RowTable",
    "SegmentTable",
    "SortedTable",
    "is_ascending",
    "segment_heads",
    "spread_segments",
]

_LARGEST_GRID = 1 << 26
"""Maximum number of elements of a captured tensor that gets a mip map, which takes 4/3 of them."""

_CHUNK_BITS = 4
_FEW_SEGMENTS = 1 << 13
_GLANCE = 4096
_MOST_SPREAD = 1 << 22
"""Maximum number of elements of a table that keeps each element's segment, 4 bytes each: reading
it is twenty times as fast as searching among the heads of a few thousand segments."""
_MANY = 1 << 16
"""Number of elements above which flags are searched in words of eight."""


class RowTable(Protocol):
    """Values [R, N], looked up along the second dimension."""

    def look_up(self, row: Tensor | int, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Flag]:
        """Return (smallest, largest, they are exact) of ``values[row, low:high + 1]``.

        Args:
            row, low, high: int64 [n] or broadcastable, inside the table.
        """
        ...


class SortedTable:
    """Rows that don't decrease: the ends of a range hold its smallest and largest value."""

    def __init__(self, values: Tensor) -> None:
        self._flat = values.reshape(-1)
        self._length = values.shape[1]

    def look_up(self, row: Tensor | int, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Flag]:
        """See `RowTable`."""
        start = row * self._length
        return _read(self._flat, _at(start, low)), _read(self._flat, _at(start, high)), True


class SegmentTable:
    """Rows [R, N] cut into segments of equal values.

    Args:
        heads: flat position of each segment's first element, int64 [segments], ascending; each
            row begins one.
        values: of the segments.
        shape: [R, N].

    Attributes:
        ascending: no row decreases.
    """

    def __init__(self, heads: Tensor, values: Tensor, shape: torch.Size) -> None:
        self._heads = heads
        self._length = length = shape[1]
        self._values = values
        self._segment_of: Tensor | None = None
        if 2 * heads.numel() <= shape.numel() <= _MOST_SPREAD:
            self._segment_of = spread_segments(heads, shape.numel())
        same_row = heads[1:] % length != 0
        self.ascending = not bool((same_row & ~(values[1:] >= values[:-1])).any())
        if self.ascending:
            return
        # With many segments the bounds round outwards to chunks, which costs a sixteenth.
        self._bits = 0 if values.numel() <= _FEW_SEGMENTS else _CHUNK_BITS
        low, high = _chunk_extremes(values, 1 << self._bits)
        lows, highs, starts, width = [low], [high], [0], 1
        while 2 * width <= low.numel():
            starts.append(starts[-1] + lows[-1].numel())
            lows.append(torch.minimum(lows[-1][:-width], lows[-1][width:]))
            highs.append(torch.maximum(highs[-1][:-width], highs[-1][width:]))
            width *= 2
        self._low, self._high = torch.cat(lows), torch.cat(highs)
        self._starts = torch.tensor(starts, device="cpu")

    def look_up(self, row: Tensor | int, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Flag]:
        """See `RowTable`."""
        start = row * self._length
        first, last = self._segment(_at(start, low)), self._segment(_at(start, high))
        if self.ascending:
            return _read(self._values, first), _read(self._values, last), True
        left, right = first >> self._bits, last >> self._bits
        _, exponent = torch.frexp((right - left + 1).to(torch.float64))
        level = exponent.to(torch.int64) - 1
        begin = _read(self._starts, level)
        here, there = begin + left, begin + right + 1 - (1 << level)
        smallest = torch.minimum(_read(self._low, here), _read(self._low, there))
        largest = torch.maximum(_read(self._high, here), _read(self._high, there))
        if self._bits == 0:
            return smallest, largest, True
        single = first == last
        value = _read(self._values, first)
        smallest = torch.where(single, value, smallest)
        return smallest, torch.where(single, value, largest), single

    def _segment(self, position: Tensor) -> Tensor:
        """Return the segment of flat positions, int64, or int32 where each element has it."""
        if self._segment_of is not None:
            return _read(self._segment_of, position)
        return torch.searchsorted(self._heads, position, right=True) - 1


class GridTable:
    """Values [R, M, N], looked up over a box of the last two dimensions."""

    def __init__(self, values: Tensor) -> None:
        levels = [(values, values)]
        while max(levels[-1][0].shape[1:]) > 1:
            low, high = levels[-1]
            levels.append((_halved(low, torch.amin), _halved(high, torch.amax)))
        starts = [0]
        for low, _ in levels[:-1]:
            starts.append(starts[-1] + low.numel())
        self._starts = torch.tensor(starts, device="cpu")
        self._rows = torch.tensor([low.shape[1] for low, _ in levels], device="cpu")
        self._columns = torch.tensor([low.shape[2] for low, _ in levels], device="cpu")
        self._low = torch.cat([low.reshape(-1) for low, _ in levels])
        self._high = torch.cat([high.reshape(-1) for _, high in levels])

    def look_up(
        self, row: Tensor | int, low: tuple[Tensor, Tensor], high: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return (smallest, largest) over a box that holds the one asked for.

        Args:
            row: int64 [n] or an int.
            low, high: the box's ends in each of the two dimensions, inside the table.
        """
        side = torch.maximum(high[0] - low[0], high[1] - low[1]) + 1
        # Tiles of this level are at least as wide as the box: it meets two in each dimension.
        _, exponent = torch.frexp((side - 2).clamp(min=0).to(torch.float64))
        level = exponent.to(torch.int64)
        columns = self._columns[level]
        start = self._starts[level] + row * self._rows[level] * columns
        places = [
            start + (i >> level) * columns + (j >> level)
            for i in (low[0], high[0])
            for j in (low[1], high[1])
        ]
        smallest, largest = self._low[places[0]], self._high[places[0]]
        for place in places[1:]:
            smallest = torch.minimum(smallest, self._low[place])
            largest = torch.maximum(largest, self._high[place])
        return smallest, largest


def is_ascending(values: Tensor) -> bool:
    """Tell whether no row of [R, N] decreases; NaN counts as a decrease."""
    # Most rows that don't ascend show it soon.
    begin = values[:, :_GLANCE]
    return all(bool((v[:, 1:] >= v[:, :-1]).all()) for v in (begin, values))


def segment_heads(values: Tensor) -> Tensor:
    """Return the flat positions in [R, N] where a row or a run of equal values begins, int64."""
    count = values.numel()
    begins = torch.zeros(-(-count // 8) * 8, dtype=torch.bool, device="cpu")
    grid = begins[:count].view(values.shape)
    grid[:, 0] = True
    torch.ne(values[:, 1:], values[:, :-1], out=grid[:, 1:])
    if count < _MANY:
        return begins.nonzero().squeeze(1)
    # Most words of eight flags have none set.
    words = begins.view(torch.int64)
    place = words.nonzero().squeeze(1)
    flag = words.index_select(0, place).view(torch.bool).nonzero().squeeze(1)
    return place.index_select(0, flag >> 3) * 8 + (flag & 7)


def spread_segments(heads: Tensor, count: int) -> Tensor:
    """Return which segment each of `count` elements belongs to, int32; see `SegmentTable`."""
    lengths = torch.empty(heads.numel(), dtype=torch.int32, device="cpu")
    torch.sub(heads[1:], heads[:-1], out=lengths[:-1])
    lengths[-1] = count - int(heads[-1])
    return torch.repeat_interleave(lengths, output_size=count)


def _at(start: Tensor | int, offset: Tensor) -> Tensor:
    # Skips adding the first row's start: tensor operations dominate the cost of small masks.
    return offset if isinstance(start, int) and start == 0 else start + offset


def _read(flat: Tensor, place: Tensor) -> Tensor:
    """Return ``flat[place]``; with one index dimension three times as fast."""
    return flat.index_select(0, place) if place.dim() == 1 else flat[place]


def _chunk_extremes(values: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    if chunk == 1:
        return values, values
    whole = values.numel() // chunk * chunk
    lows, highs = [], []
    if whole:
        grid = values[:whole].view(-1, chunk)
        lows.append(grid.amin(1))
        highs.append(grid.amax(1))
    if whole < values.numel():
        rest = values[whole:]
        lows.append(rest.amin(0, keepdim=True))
        highs.append(rest.amax(0, keepdim=True))
    return torch.cat(lows), torch.cat(highs)


def _halved(values: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce pairs of rows and of columns; an odd last one stays alone."""
    if values.shape[1] % 2:
        values = torch.cat([values, values[:, -1:]], 1)
    if values.shape[2] % 2:
        values = torch.cat([values, values[:, :, -1:]], 2)
    rows, height, width = values.shape
    by_rows = reduce(values.view(rows, height // 2, 2, width), 2)
    return reduce(by_rows.view(rows, height // 2, width // 2, 2), 3)


class CapturedTables:
    """Tables of the captured tensors, made when a mask needs them.

    Args:
        captured: on the CPU.
    """

    def __init__(self, captured: Sequence[Tensor]) -> None:
        self.captured = [
            tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor for tensor in captured
        ]
        self._whole: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows: dict[tuple[int, int], RowTable] = {}
        self._grids: dict[tuple[int, int, int], GridTable] = {}

    def whole(self, position: int) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest value of a tensor that isn't empty, 0-d."""
        if position not in self._whole:
            low, high = torch.aminmax(self.captured[position])
            self._whole[position] = (low, high)
        return self._whole[position]

    def rows(self, position: int, moving: int) -> RowTable:
        """Return the table along dimension `moving`; its rows count through the others."""
        key = (position, moving)
        if key not in self._rows:
            tensor = self.captured[position]
            values = tensor.movedim(moving, -1).reshape(-1, tensor.shape[moving])
            if is_ascending(values):
                self._rows[key] = SortedTable(values)
            else:
                heads = segment_heads(values)
                self._rows[key] = SegmentTable(heads, values.reshape(-1)[heads], values.shape)
        return self._rows[key]

    def grid(self, position: int, moving: tuple[int, int]) -> GridTable | None:
        """Return the table along two dimensions, or None for a tensor that is too large."""
        key = (position, *moving)
        tensor = self.captured[position]
        if tensor.numel() > _LARGEST_GRID:
            return None
        if key not in self._grids:
            shape = [tensor.shape[dimension] for dimension in moving]
            self._grids[key] = GridTable(tensor.movedim(moving, (-2, -1)).reshape(-1, *shape))
        return self._grids[key]
