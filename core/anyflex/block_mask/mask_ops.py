"""The static ops that build a block mask where a program is recorded: torch.compile and export.

A recorded program knows no values, so what depends on them runs when the program does. The three
ops return offsets, runs and the mask's mark (`anyflex.mask_structure.views_registry`). The number
of runs depends on values and the shape of `runs` may not: it has spare rows. Importing this module
defines the ops and nothing else, for programs that were saved by another process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.tensors.static_ops import implement
from anyflex.tensors.symbolic_numbers import largest, least

__all__ = ["built_op", "checked_op", "rows_op"]

Outputs = tuple[Tensor, Tensor, Tensor]

# torch.library is not annotated.
_library: Any = torch.library.Library("anyflex", "FRAGMENT")  # type: ignore[no-untyped-call]
_uncapturable = getattr(torch.Tag, "cudagraph_unsafe", None)
_tags = () if _uncapturable is None else (_uncapturable,)
_MASK = "-> (Tensor, Tensor, Tensor)"
# tensors: those that the mask mod captured, then, as 0-d CPU float64 tensors, a 1 that no mod
# reads and its floats. ints: how many tensors it captured; batch and heads of the mask; Q_LEN and
# KV_LEN; the block size; then its ints. No list is ever empty: AOTInductor's executor hands an
# empty list on as None.
_library.define(
    f"block_mask(Tensor[] tensors, SymInt[] ints, str request, *, Device device) {_MASK}",
    tags=_tags,
)
# ints: Q_LEN and KV_LEN; the block size; 1 if there is a mask mod; rows that runs must have.
_library.define(
    f"checked_block_mask(Tensor offsets, Tensor runs, SymInt[] ints) {_MASK}", tags=_tags
)
# structure: offsets and runs, and the mark if there is one. ints: Q_LEN and KV_LEN; the block
# size; start, stop and kv_len; 1 if the mask mod can tell what a block of two kinds holds.
_library.define(f"block_mask_rows(Tensor[] structure, SymInt[] ints) {_MASK}", tags=_tags)


def _built(
    tensors: list[Tensor], ints: list[int], request: str, *, device: torch.device
) -> Outputs:
    from anyflex.block_mask.op_implementations import built

    return built(tensors, ints, request, device)


def _checked(offsets: Tensor, runs: Tensor, ints: list[int]) -> Outputs:
    from anyflex.block_mask.op_implementations import checked

    return checked(offsets, runs, ints)


def _rows(structure: list[Tensor], ints: list[int]) -> Outputs:
    from anyflex.block_mask.op_implementations import rows

    return rows(structure, ints)


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


def _fake_built(
    tensors: list[Tensor], ints: list[int], request: str, *, device: torch.device
) -> Outputs:
    from anyflex.block_mask.mask_request import room
    from anyflex.mask_structure.runs import block_count

    _, batch, heads, q_length, kv_length, q_block, kv_block = ints[:7]
    rows, columns = block_count(q_length, q_block), block_count(kv_length, kv_block)
    return _fake((batch, heads, rows), room(batch, heads, rows, columns), device)


def _fake_checked(offsets: Tensor, runs: Tensor, ints: list[int]) -> Outputs:
    from anyflex.mask_structure.runs import block_count

    q_length, _, q_block, _, _, capacity = ints
    batch, heads, _ = offsets.shape
    rows = block_count(q_length, q_block)
    needed = largest(2, capacity)
    return _fake((batch, heads, rows), runs.shape[0], offsets.device, needed)


def _fake_rows(structure: list[Tensor], ints: list[int]) -> Outputs:
    from anyflex.mask_structure.runs import block_count

    offsets, runs = structure[:2]
    _, _, q_block, kv_block, start, stop, kv_length, _ = ints
    batch, heads, _ = offsets.shape
    rows, columns = block_count(stop - start, q_block), block_count(kv_length, kv_block)
    # A row of the result comes from at most two, and each of those reaches into at most two.
    most = least(2 * runs.shape[0], batch * heads * rows * columns)
    return _fake((batch, heads, rows), most, offsets.device)


for _name, _implementation, _of_fakes in (
    ("block_mask", _built, _fake_built),
    ("checked_block_mask", _checked, _fake_checked),
    ("block_mask_rows", _rows, _fake_rows),
):
    implement(_library, _name, _implementation, _of_fakes)

built_op = torch.ops.anyflex.block_mask.default
checked_op = torch.ops.anyflex.checked_block_mask.default
rows_op = torch.ops.anyflex.block_mask_rows.default
