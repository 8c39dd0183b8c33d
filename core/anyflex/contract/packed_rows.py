"""PackedRows: whose rows are whose in a call of packed sequences."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from anyflex.tensors.derived_forms import DerivedForms

__all__ = ["PackedRows"]


@dataclass(frozen=True, eq=False)
class PackedRows(DerivedForms):
    """Sequences of a call whose spec has ``q_layout="packed"``. Tensors are int32, contiguous (but
    for the rows of a page table) and on the call's device.

    Sequence i has rows ``q_offsets[i]:q_offsets[i + 1]`` of ``Call.query`` [1, Hq, T, E]. Mods see
    ``b = slots[i]``, ``q_idx = q_starts[i] + row`` and ``kv_idx`` from 0 to ``kv_lengths[i] - 1``.
    Rows from ``q_offsets[N]`` on have out 0, lse and max_scores -inf. Nothing but its keys reaches
    a sequence's results, whatever bits other memory holds.

    The layers of a step are called with one object: what a kernel finds from these numbers alone
    it may keep there by `once`, made in the order of the stream. Other numbers come as another.

    A block mask has a row of blocks for each entry of `blocks`; its kv blocks count in each
    sequence's own keys.

    Args:
        q_offsets: [N + 1].
        q_starts, kv_lengths, slots: [N].
        kv_offsets: [N], first row of each sequence in ``Call.key`` [1, Hkv, S, E]; or None.
        page_table: [R, W] where ``kv_layout="paged"``: ``Call.key`` and ``Call.value`` are pools
            [P, Hkv, page_size, E | Ev], and key p of sequence i is row ``p % page_size`` of page
            ``page_table[row, p // page_size]``, row being ``table_rows[i]``, or i where that is
            None. Entries past a length mean nothing. On a CPU others are inside of the pool.
        table_rows: [N] or None.
        max_q, max_kv: no sequence has more query rows; of more keys, which a device's kv_lengths
            may have, the first max_kv are read.
        lowest, highest: no index that mods see is below or above; None where the host doesn't
            know.
        blocks: [n, 2], sequence and number in it of each block of 128 query rows: sequence after
            sequence, ``ceil(rows / 128)`` of each, then sequence N, the rows from
            ``q_offsets[N]`` on. Elsewhere than on a CPU there may also be blocks of a sequence
            behind its last row, and -1 in rows that the bounds leave over.
    """

    q_offsets: Tensor
    q_starts: Tensor
    kv_lengths: Tensor
    slots: Tensor
    kv_offsets: Tensor | None
    page_table: Tensor | None
    table_rows: Tensor | None
    max_q: int
    max_kv: int
    lowest: int | None
    highest: int | None
    blocks: Tensor
