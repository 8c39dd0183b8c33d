"""Evaluation of every element, a bounded number at once, for functions that can't be traced."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anyflex.block_mask.elementwise_evaluation import Elements
from anyflex.block_mask.undecided_blocks import Budget
from anyflex.mask_structure.runs import FULL, PARTIAL, RunList, block_count, runs_of_grid

__all__ = ["chunked_runs", "element_boxes", "live_elements"]

_ELEMENTS = 1 << 20
"""Number of elements evaluated at once; each takes about 10 bytes."""

Box = tuple[int, int, int, int, int, int, int, int]
"""b0, b1, h0, h1, q0, q1, k0, k1; ends excluded."""


def live_elements(elements: Elements, box: Box) -> Tensor:
    """Return bool [b, h, q, k]: which elements of a box are live."""
    b0, b1, h0, h1, q0, q1, k0, k1 = box
    ends = ((b0, b1), (h0, h1), (q0, q1), (k0, k1))
    return elements.live(*(torch.arange(*pair, device=elements.device) for pair in ends))


def chunked_runs(
    elements: Elements,
    batch: int,
    heads: int,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    budget: Budget,
) -> RunList:
    """Return the runs of all blocks; rows of blocks past the budget become PARTIAL."""
    rows, columns = (block_count(*pair) for pair in zip(lengths, block_size, strict=True))
    parts: list[RunList] = []
    open_rows = torch.ones(batch * heads * rows, dtype=torch.bool, device="cpu")
    place: tuple[int, int, int] | None = None
    some = every = torch.empty(0, device="cpu")

    def close() -> None:
        if place is not None:
            for first, runs in _grid_runs(place, some, every, heads, rows):
                open_rows[first : first + some.shape[2]] = False
                parts.append(runs)

    for box in element_boxes(batch, heads, lengths, block_size):
        b0, b1, h0, h1, q0, q1, k0, k1 = box
        if not budget.take((b1 - b0) * (h1 - h0) * (q1 - q0) * (k1 - k0)):
            break
        live = live_elements(elements, box)
        some_here, every_here = _block_bounds(live, block_size)
        # Boxes that differ in kv only, or lie in one row of blocks, fill one grid.
        if place != (b0, h0, q0 // block_size[0]):
            close()
            place = (b0, h0, q0 // block_size[0])
            some = some_here.new_zeros(*some_here.shape[:3], columns)
            every = some_here.new_ones(*some_here.shape[:3], columns)
        first = k0 // block_size[1]
        some[..., first : first + some_here.shape[3]] |= some_here
        every[..., first : first + some_here.shape[3]] &= every_here
    else:
        close()
    rest = open_rows.nonzero().squeeze(1)
    if columns and budget.exceeded:
        whole = (torch.zeros_like(rest), torch.full_like(rest, columns))
        parts.append(RunList(rest, *whole, torch.full_like(rest, PARTIAL)))
    if not parts:
        return RunList(*torch.zeros(4, 0, dtype=torch.int64, device="cpu"))
    return RunList(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _grid_runs(
    place: tuple[int, int, int], some: Tensor, every: Tensor, heads: int, rows: int
) -> Iterator[tuple[int, RunList]]:
    """Yield the first row and the runs of each batch entry and head of a grid."""
    kinds = torch.where(every, FULL, torch.where(some, PARTIAL, 0)).to(torch.int8).cpu()
    for b, grids in enumerate(kinds):
        for h, grid in enumerate(grids):
            first = ((place[0] + b) * heads + place[1] + h) * rows + place[2]
            yield first, runs_of_grid(grid, first)


def element_boxes(
    batch: int, heads: int, lengths: tuple[int, int], block_size: tuple[int, int]
) -> Iterator[Box]:
    """Yield boxes of at most 2^20 elements that cover all.

    Along q and kv a box is either whole blocks or a part of one block.
    """
    if not (batch and heads and lengths[0] and lengths[1]):
        return
    q_block, kv_block = min(block_size[0], lengths[0]), min(block_size[1], lengths[1])
    q_step = min(q_block, max(1, _ELEMENTS // kv_block), _ELEMENTS)
    kv_step = min(kv_block, _ELEMENTS)
    if q_step == q_block and q_block * kv_block <= _ELEMENTS:
        kv_step = _whole(_ELEMENTS // q_step, kv_block, lengths[1])
        if kv_step >= lengths[1]:
            q_step = _whole(_ELEMENTS // lengths[1], q_block, lengths[0])
    rest = max(1, _ELEMENTS // (min(q_step, lengths[0]) * min(kv_step, lengths[1])))
    h_step = min(heads, rest)
    b_step = min(batch, max(1, rest // h_step)) if h_step == heads else 1
    for b in range(0, batch, b_step):
        for h in range(0, heads, h_step):
            for q0, q1 in _intervals(lengths[0], q_block, q_step):
                for k0, k1 in _intervals(lengths[1], kv_block, kv_step):
                    yield b, min(b + b_step, batch), h, min(h + h_step, heads), q0, q1, k0, k1


def _whole(room: int, block: int, length: int) -> int:
    """Return the largest multiple of `block` within `room`, or one that covers `length`."""
    return min(max(room // block, 1), block_count(length, block)) * block


def _intervals(length: int, block: int, step: int) -> Iterator[tuple[int, int]]:
    if step >= block:
        for begin in range(0, length, step):
            yield begin, min(begin + step, length)
        return
    for start in range(0, length, block):
        for begin in range(start, min(start + block, length), step):
            yield begin, min(begin + step, start + block, length)


def _block_bounds(live: Tensor, block_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return (some element is live, every element is live) bool [b, h, rows, columns]."""
    # amax and amin of bytes are vectorised, 50 times as fast as any() and all() of bools.
    values = live.contiguous().view(torch.uint8)
    some, every = (
        _reduced(_reduced(values, 2, block_size[0], largest), 3, block_size[1], largest)
        for largest in (True, False)
    )
    return some.view(torch.bool), every.view(torch.bool)


def _reduced(values: Tensor, dim: int, block: int, largest: bool) -> Tensor:
    reduce = torch.amax if largest else torch.amin
    whole = values.shape[dim] // block * block
    parts = []
    if whole:
        head = values.narrow(dim, 0, whole)
        head = head.view(*head.shape[:dim], -1, block, *head.shape[dim + 1 :])
        parts.append(reduce(head, dim + 1))
    if whole < values.shape[dim]:
        tail = values.narrow(dim, whole, values.shape[dim] - whole)
        parts.append(reduce(tail, dim, keepdim=True))
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]
