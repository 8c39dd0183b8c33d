"""Evaluation of every element, a bounded number at once, for functions that can't be traced."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from anyflex.block_mask.elementwise_evaluation import Elements
from anyflex.block_mask.undecided_blocks import Budget
from anyflex.intervals.evaluation import Domain
from anyflex.mask_structure.runs import FULL, PARTIAL, RunList, block_count, joined, runs_of_grid

__all__ = ["chunked_runs", "live_boxes"]

_ELEMENTS = 1 << 20
"""Number of elements evaluated at once, if a row has no more; each takes about 10 bytes."""

Box = tuple[slice, slice, slice]
"""Batch entries, heads and rows of elements; all keys."""


def live_boxes(
    elements: Elements,
    batch: int,
    heads: int,
    lengths: tuple[int, int],
    q_block: int = 1,
    budget: Budget | None = None,
) -> Iterator[tuple[Box, Tensor]]:
    """Yield boxes that cover all rows in order, and bool [b, h, q, KV_LEN]: which elements are
    live. It ends early where the budget does.

    Args:
        q_block: a box is some whole blocks of rows, or a part of one block.
    """
    q_length, kv_length = lengths
    if not (batch and heads and q_length and kv_length):
        return
    rows = max(1, _ELEMENTS // kv_length)
    block = min(q_block, q_length)
    step = rows // block * block or rows
    for b in _cut(0, batch, max(1, rows // (q_length * heads))):
        for h in _cut(0, heads, max(1, rows // q_length)):
            for whole in _cut(0, q_length, max(step, block)):
                for q in _cut(whole.start, whole.stop, step):
                    indices = [
                        torch.arange(part.start, part.stop, device=elements.device)
                        for part in (b, h, q, slice(0, kv_length))
                    ]
                    count = math.prod(index.numel() for index in indices)
                    if budget is not None and not budget.take(count):
                        return
                    yield (b, h, q), elements.live(*indices)


def chunked_runs(elements: Elements, domain: Domain, budget: Budget) -> RunList:
    """Return the runs of all blocks; rows of blocks past the budget become PARTIAL."""
    (q_length, _), (q_block, _) = domain.lengths, domain.block_size
    rows, columns = (block_count(*p) for p in zip(domain.lengths, domain.block_size, strict=True))
    parts: list[RunList] = []
    some = every = torch.empty(0, device="cpu")
    done = 0
    boxes = live_boxes(elements, domain.batch, domain.heads, domain.lengths, q_block, budget)
    for (_, _, q), live in boxes:
        some_here, every_here = _block_bounds(live, domain.block_size)
        first_part = q.start % q_block == 0
        some = some_here if first_part else some | some_here
        every = every_here if first_part else every & every_here
        if q.stop % q_block == 0 or q.stop == q_length:
            kinds = torch.where(every, FULL, torch.where(some, PARTIAL, 0)).to(torch.int8).cpu()
            kinds = kinds.flatten(0, 2)
            parts.append(runs_of_grid(kinds, done))
            done += kinds.shape[0]
    if columns and budget.exceeded:
        rest = torch.arange(done, domain.batch * domain.heads * rows, device="cpu")
        whole = (torch.zeros_like(rest), torch.full_like(rest, columns))
        parts.append(RunList(rest, *whole, torch.full_like(rest, PARTIAL)))
    return joined(parts)


def _cut(begin: int, end: int, size: int) -> Iterator[slice]:
    for start in range(begin, end, size):
        yield slice(start, min(start + size, end))


def _block_bounds(live: Tensor, block_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return (some element is live, every element is live) bool [b, h, rows, columns]."""
    q_side, kv_side = (min(pair) for pair in zip(block_size, live.shape[2:], strict=True))
    missing = (0, -live.shape[3] % kv_side, 0, -live.shape[2] % q_side)
    bounds = []
    # amax and amin of bytes are vectorised, 50 times as fast as any() and all() of bools.
    for reduce, neutral in ((torch.amax, 0), (torch.amin, 1)):
        values = torch.nn.functional.pad(live.view(torch.uint8), missing, value=neutral)
        in_rows = reduce(torch.unflatten(values, 2, (-1, q_side)), 3)
        bounds.append(reduce(torch.unflatten(in_rows, 3, (-1, kv_side)), 4).view(torch.bool))
    return bounds[0], bounds[1]
