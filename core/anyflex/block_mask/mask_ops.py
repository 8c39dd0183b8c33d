"""The static ops that build a block mask where a program is recorded: torch.compile and export.

A recorded program knows no values, so what depends on them runs when the program does. The three
ops return offsets, runs and the mask's mark (`anyflex.mask_structure.views_registry`). The number
of runs depends on values and the shape of `runs` may not: it has spare rows. Here are their
implementations on fake tensors; `anyflex.tensors.static_ops` has the schemas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.block_mask.mask_request import room
from anyflex.mask_structure.runs import block_count
from anyflex.tensors.symbolic_numbers import largest, least

__all__ = ["built_op", "checked_op", "fake_built", "fake_checked", "fake_rows", "rows_op"]

Outputs = tuple[Tensor, Tensor, Tensor]


def _fake(like: tuple[Any, Any, Any], most: Any, device: torch.device, needed: Any = 2) -> Outputs:
    """Return empty outputs.

    Args:
        like: B', H' and Qb.
        most: number of runs that the rows of blocks can have.
        needed: rows that runs has at least.
    """
    batch, heads, rows = like
    # Two rows at least: torch.compile makes a graph of its own for each of the sizes 0 and 1.
    room = largest(needed, most)
    return (
        torch.empty((batch, heads, rows + 1), dtype=torch.int32, device=device),
        torch.empty((room, 3), dtype=torch.int32, device=device),
        torch.empty(2, dtype=torch.int64, device="cpu"),
    )


def fake_built(
    tensors: list[Tensor], ints: list[int], request: str, *, device: torch.device
) -> Outputs:
    _, batch, heads, q_length, kv_length, q_block, kv_block = ints[:7]
    rows, columns = block_count(q_length, q_block), block_count(kv_length, kv_block)
    return _fake((batch, heads, rows), room(batch, heads, rows, columns), device)


def fake_checked(offsets: Tensor, runs: Tensor, ints: list[int]) -> Outputs:
    q_length, _, q_block, _, _, capacity = ints
    batch, heads, _ = offsets.shape
    rows = block_count(q_length, q_block)
    needed = largest(2, capacity)
    return _fake((batch, heads, rows), runs.shape[0], offsets.device, needed)


def fake_rows(structure: list[Tensor], ints: list[int]) -> Outputs:
    offsets, runs = structure[:2]
    _, _, q_block, kv_block, start, stop, kv_length, _ = ints
    batch, heads, _ = offsets.shape
    rows, columns = block_count(stop - start, q_block), block_count(kv_length, kv_block)
    # A row of the result comes from at most two, and each of those reaches into at most two.
    most = least(2 * runs.shape[0], batch * heads * rows * columns)
    return _fake((batch, heads, rows), most, offsets.device)


built_op = torch.ops.anyflex.block_mask.default
checked_op = torch.ops.anyflex.checked_block_mask.default
rows_op = torch.ops.anyflex.block_mask_rows.default
