"""Row tables: for each packed query row the numbers that relabel a dense call's indices.

A packed call is a dense call of batch 1 whose one row of sequences holds all of them. What its
mods load depends on the query row alone: an element costs them one subtraction more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anyflex.packed.packed import Packed
from anyflex.tracing.mod_types import MaskMod, ScoreMod

__all__ = ["RowTables", "relabelled_mask", "relabelled_score", "row_owners", "row_tables"]


class RowTables(NamedTuple):
    """Numbers of each query row, int32 [T].

    Args:
        slot: what the mods see as b.
        shift: is added to the row for its position in the sequence.
        begin, end: the rows of packed keys that it may read; none for a padding row.
    """

    slot: Tensor
    shift: Tensor
    begin: Tensor
    end: Tensor


def row_owners(packed: Packed, rows: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of query rows, int32 [T], and of their sequences; N for padding rows, and
    -1 for rows before the first sequence's, where a device's numbers are wrong."""
    row = torch.arange(rows, dtype=torch.int32, device=packed.device)
    # All offsets, because Inductor of torch 2.11 reads a slice's boundaries from its base's first
    # element on, where it compiles for GPUs.
    offsets = packed.q_offsets.contiguous()
    return row, torch.searchsorted(offsets, row, right=True, out_int32=True) - 1


def row_tables(packed: Packed, rows: int, kv_begins: Tensor, keys: int) -> RowTables:
    """Return the tables of a batch, made on its device without waiting for it.

    Args:
        packed: the batch.
        rows: T, rows of the query tensor.
        kv_begins: int32 [N], first packed key of each sequence.
        keys: S, rows of the packed keys; what numbers on a device say beyond it is cut off.
    """
    _, owner = row_owners(packed, rows)

    def of_rows(numbers: Tensor) -> Tensor:
        # One more sequence, which owns the padding rows and has no keys.
        return torch.cat([numbers, numbers.new_zeros(1)])[owner]

    begin = of_rows(kv_begins)
    end = (begin + of_rows(packed.kv_lengths)).clamp(max=keys)
    shift = of_rows(packed.q_starts - packed.q_offsets[:-1])
    return RowTables(of_rows(packed.slots), shift, begin, end)


def relabelled_mask(mask_mod: MaskMod | None, tables: RowTables) -> MaskMod:
    """Return the mask mod of the dense call: a sequence's own keys, and of them what `mask_mod`
    keeps."""
    slot, shift, begin, end = tables

    def own_keys(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx >= begin[q_idx]) & (kv_idx < end[q_idx])

    if mask_mod is None:
        return own_keys

    def relabelled(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        own = (kv_idx >= begin[q_idx]) & (kv_idx < end[q_idx])
        position = q_idx + shift[q_idx]
        return own & mask_mod(slot[q_idx].long(), h, position, kv_idx - begin[q_idx])

    return relabelled


def relabelled_score(score_mod: ScoreMod, tables: RowTables) -> ScoreMod:
    """Return the score mod of the dense call."""
    slot, shift, begin, _ = tables

    def relabelled(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        position = q_idx + shift[q_idx]
        return score_mod(score, slot[q_idx].long(), h, position, kv_idx - begin[q_idx])

    return relabelled
