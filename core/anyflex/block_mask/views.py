"""MaskViews: a block mask's structure on one device, in every form that a kernel may want."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from anyflex.block_mask.runs import (
    FULL,
    PARTIAL,
    RunList,
    block_count,
    expand_rows,
    pack,
    transpose,
    unpack,
)

__all__ = ["FULL", "PARTIAL", "IndexLists", "MaskViews", "listed"]

Form = TypeVar("Form")


@dataclass(frozen=True, slots=True, eq=False)
class IndexLists:
    """torch's layout: counts int32 [B', H', Qb] and block indices int32 [B', H', Qb, Kb].

    The first ``num_blocks`` indices of a row are its blocks, ascending; the others are the row's
    remaining columns, ascending, and mean nothing.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor
    full_kv_indices: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MaskViews:
    """Which blocks are visited, and how. Derived forms are made once and kept; thread-safe.

    Deriving one reads the runs on the host: under a device graph's capture derive it before.

    Args:
        offsets: int32 [B', H', Qb + 1]; runs of row r are ``runs[offsets[r]:offsets[r + 1]]``.
        runs: int32 [n, 3]: first block, end block (excluded), FULL or PARTIAL. n may exceed
            ``offsets[-1]``: trust offsets only.
        q_length, kv_length: in elements; the last block of each may be ragged.
        block_size: elements of a block, (q, kv).
    """

    offsets: Tensor
    runs: Tensor
    q_length: int
    kv_length: int
    block_size: tuple[int, int]
    _derived: dict[object, object] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)

    @property
    def device(self) -> torch.device:
        """Where offsets and runs are."""
        return self.offsets.device

    @property
    def q_blocks(self) -> int:
        """Rows of blocks, Qb."""
        return self.offsets.shape[2] - 1

    @property
    def kv_blocks(self) -> int:
        """Columns of blocks, Kb."""
        return block_count(self.kv_length, self.block_size[1])

    def on(self, device: torch.device) -> MaskViews:
        """Return the same views on `device`, copied at most once."""
        if device == self.offsets.device:
            return self
        return self._once(device, MaskViews, lambda: self._copied(device))

    def transposed(self) -> MaskViews:
        """Return the mask with rows and columns exchanged: for each kv block the q blocks.

        Its offsets are [B', H', Kb + 1], its ``q_length`` is this one's ``kv_length`` and so on.
        """
        return self._once("transposed", MaskViews, self._transpose)

    def index_lists(self) -> IndexLists:
        """Return the structure in torch's layout; memory is O(Qb * Kb)."""
        return self._once("index_lists", IndexLists, self._index_lists)

    def kind_rows(self, q_block_begin: int, q_block_end: int) -> Tensor:
        """Return int8 [B', H', rows, Kb]: 0 not visited, 1 FULL, 2 PARTIAL.

        Nothing larger than these rows is made.
        """
        host = self.on(torch.device("cpu"))
        batch, heads, _ = self.offsets.shape
        rows = q_block_end - q_block_begin
        if not 0 <= q_block_begin <= q_block_end <= self.q_blocks:
            raise IndexError(
                f"rows {q_block_begin}:{q_block_end} of {self.q_blocks} rows of blocks"
            )
        window = host.offsets[:, :, q_block_begin : q_block_end + 1].to(torch.int64)
        counts = (window[..., 1:] - window[..., :-1]).reshape(-1)
        row = torch.arange(counts.numel()).repeat_interleave(counts)
        inside = torch.arange(row.numel()) - (counts.cumsum(0) - counts)[row]
        used = host.runs[window[..., :-1].reshape(-1)[row] + inside].to(torch.int64)
        runs = RunList(row, *used.unbind(1))
        grid = expand_rows(runs, 0, batch * heads * rows, self.kv_blocks)
        return grid.view(batch, heads, rows, self.kv_blocks).to(self.device)

    def _once(self, name: object, kind: type[Form], make: Callable[[], Form]) -> Form:
        found = self._derived.get(name)
        if found is None:
            with self._lock:
                found = self._derived.get(name)
                if found is None:
                    found = self._derived[name] = make()
        assert isinstance(found, kind)
        return found

    def _copied(self, device: torch.device) -> MaskViews:
        copy = MaskViews(
            self.offsets.to(device),
            self.runs.to(device),
            self.q_length,
            self.kv_length,
            self.block_size,
        )
        # The copy derives its forms from this object where this one is on the host already.
        copy._derived[self.device] = self
        return copy

    def _transpose(self) -> MaskViews:
        host = self.on(torch.device("cpu"))
        if host is not self:
            return host.transposed().on(self.device)
        batch, heads, _ = self.offsets.shape
        runs = transpose(
            unpack(self.offsets, self.runs), batch * heads, self.q_blocks, self.kv_blocks
        )
        offsets, packed = pack(runs, batch, heads, self.kv_blocks, self.q_blocks)
        sizes = (self.block_size[1], self.block_size[0])
        return MaskViews(offsets, packed, self.kv_length, self.q_length, sizes)

    def _index_lists(self) -> IndexLists:
        grid = self.kind_rows(0, self.q_blocks)
        return IndexLists(*listed(grid == PARTIAL), *listed(grid == FULL))


def listed(grid: Tensor) -> tuple[Tensor, Tensor]:
    """Return (counts, indices) in torch's layout of a bool grid [..., columns]."""
    counts = grid.sum(-1, dtype=torch.int32)
    order = torch.argsort(grid.to(torch.int8), dim=-1, descending=True, stable=True)
    return counts, order.to(torch.int32)
