"""MaskViews: a block mask's structure on one device, in every form that a kernel may want."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from anyflex.mask_structure.run_checks import check_values
from anyflex.mask_structure.runs import (
    FULL,
    PARTIAL,
    RunList,
    block_count,
    expand_rows,
    pack,
    runs_of_grid,
    transpose,
    unpack,
    unpack_rows,
)
from anyflex.mask_structure.to_index_lists import IndexLists, list_blocks
from anyflex.tensors.derived_forms import DerivedForms

__all__ = ["FULL", "PARTIAL", "IndexLists", "MaskViews", "packed_views"]

_HOST = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class MaskViews(DerivedForms):
    """Which blocks are visited, and how. Derived forms are made once and kept; thread-safe.

    Deriving one reads the runs on the host: under a device graph's capture derive it before.

    Args:
        offsets: int32 [B', H', Qb + 1]; runs of row r are ``runs[offsets[r]:offsets[r + 1]]``.
        runs: int32 [n, 3]: first block, end block (excluded), FULL or PARTIAL. n may exceed
            ``offsets[-1]``: trust offsets only.
        q_length, kv_length: in elements; the last block of each may be ragged.
        block_size: elements of a block, (q, kv).

    Attributes:
        shape: of offsets.

    Advanced: `in_blocks`, `once`, `kind_rows` and `with_copy` are for forms of a backend's own.
    """

    offsets: Tensor
    runs: Tensor
    q_length: int
    kv_length: int
    block_size: tuple[int, int]
    # Kept, because each call asks for it and torch makes a new object each time.
    shape: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.offsets.shape))

    @property
    def device(self) -> torch.device:
        """Where offsets and runs are."""
        return self.offsets.device

    @property
    def host(self) -> MaskViews | None:
        """These views if they are on the host, else None: nothing is copied, and no device is
        waited for."""
        if self.offsets.device == _HOST:
            return self
        found = self._derived.get(_HOST)
        assert found is None or isinstance(found, MaskViews)
        return found

    @property
    def q_blocks(self) -> int:
        """Rows of blocks, Qb."""
        return self.shape[2] - 1

    @property
    def kv_blocks(self) -> int:
        """Columns of blocks, Kb."""
        return block_count(self.kv_length, self.block_size[1])

    def on(self, device: torch.device) -> MaskViews:
        """Return the same views on `device`, copied at most once."""
        if device == self.offsets.device:
            return self
        return self.once(device, MaskViews, lambda: self._copied(device))

    def transposed(self) -> MaskViews:
        """Return the mask with rows and columns exchanged: for each kv block the q blocks.

        Its offsets are [B', H', Kb + 1], its ``q_length`` is this one's ``kv_length`` and so on.
        """
        return self.once("transposed", MaskViews, self._transpose)

    def index_lists(self, *, ragged_is_partial: bool = False) -> IndexLists:
        """Return the structure in torch's layout; memory is O(Qb * Kb).

        Args:
            ragged_is_partial: a FULL block that reaches past the lengths is listed as PARTIAL, as
                torch's create_block_mask lists it. Lists that differ by that are made anew at each
                call; the others are kept.
        """
        row = ragged_is_partial and self.q_length % self.block_size[0] != 0
        column = ragged_is_partial and self.kv_length % self.block_size[1] != 0
        if row or column:
            return self._list_blocks(row, column)
        return self.once("index_lists", IndexLists, lambda: self._list_blocks(row, column))

    def in_blocks(self, block_size: tuple[int, int]) -> MaskViews:
        """Return the structure in blocks of another size: FULL where all blocks that one touches
        are, not visited where none of them is, else PARTIAL, and then these views say which of its
        elements are visited. Memory is O(Qb * Kb)."""
        if block_size == self.block_size:
            return self
        return self.once(("in_blocks", block_size), MaskViews, lambda: self._in_blocks(block_size))

    def dense(self) -> Tensor:
        """Return int8 [B', H', Qb, Kb]: 0 not visited, 1 FULL, 2 PARTIAL. Kept: don't write."""
        return self.once("dense", Tensor, lambda: self.kind_rows(0, self.q_blocks))

    def newest(self, name: object, key: object, make: Callable[[], MaskViews]) -> MaskViews:
        """Return the views that `make` makes for this key; of those of one name only the newest
        are kept."""
        found = self._derived.get(name)
        if isinstance(found, tuple) and found[0] == key:
            kept: MaskViews = found[1]
            return kept
        made = make()
        self._derived[name] = (key, made)
        return made

    def with_kv_length(self, kv_length: int) -> MaskViews:
        """Return views of the same tensors for another length of as many columns of blocks."""
        if kv_length == self.kv_length:
            return self
        # `dataclasses.replace` takes three times as long, at each step of decoding.
        longer = MaskViews(self.offsets, self.runs, self.q_length, kv_length, self.block_size)
        host = self.host
        if host is None or host is self:
            return longer
        return longer.with_copy(host.with_kv_length(kv_length))

    def with_copy(self, copy: MaskViews) -> MaskViews:
        """Return these views; from now on `copy` is what `on` gives for its device."""
        with self._lock:
            self._derived[copy.device] = copy
            copy._derived[self.device] = self
        return self

    def kind_rows(self, q_block_begin: int, q_block_end: int) -> Tensor:
        """Return int8 [B', H', rows, Kb]: 0 not visited, 1 FULL, 2 PARTIAL.

        Nothing larger than these rows is made.
        """
        host = self.on(_HOST)
        batch, heads, _ = self.shape
        rows = q_block_end - q_block_begin
        if not 0 <= q_block_begin <= q_block_end <= self.q_blocks:
            raise IndexError(
                f"rows {q_block_begin}:{q_block_end} of {self.q_blocks} rows of blocks"
            )
        runs = unpack_rows(host.offsets[:, :, q_block_begin : q_block_end + 1], host.runs)
        grid = expand_rows(runs, batch * heads * rows, self.kv_blocks)
        return grid.view(batch, heads, rows, self.kv_blocks).to(self.device)

    def _list_blocks(self, ragged_row: bool, ragged_column: bool) -> IndexLists:
        host = self.on(_HOST)
        shape = (self.shape[0], self.shape[1], self.q_blocks, self.kv_blocks)
        lists = list_blocks(
            host.kind_rows, shape, ragged_row=ragged_row, ragged_column=ragged_column
        )
        if host is self:
            return lists
        return IndexLists(*(getattr(lists, name).to(self.device) for name in lists.__slots__))

    def _copied(self, device: torch.device) -> MaskViews:
        copy = replace(self, offsets=self.offsets.to(device), runs=self.runs.to(device))
        # The copy derives its forms from this object where this one is on the host already.
        return copy.with_copy(self)

    def _in_blocks(self, block_size: tuple[int, int]) -> MaskViews:
        host = self.on(_HOST)
        if host is not self:
            return host.in_blocks(block_size).on(self.device)
        lengths = (self.q_length, self.kv_length)
        counts = [self.dense() != 0, self.dense() == FULL]
        touched = torch.ones((), dtype=torch.int64, device="cpu")
        for axis, length in enumerate(lengths):
            old, new = self.block_size[axis], block_size[axis]
            first = torch.arange(block_count(length, new), device="cpu") * new
            first, end = first // old, ((first + new).clamp(max=length) + old - 1) // old
            for place, count in enumerate(counts):
                sums = count.movedim(2 + axis, -1).cumsum(-1, dtype=torch.int32)
                sums = torch.nn.functional.pad(sums, (1, 0))
                counts[place] = (sums[..., end] - sums[..., first]).movedim(-1, 2 + axis)
            touched = touched[..., None] * (end - first)
        visited, full = counts
        kinds = torch.where(full == touched, FULL, torch.where(visited > 0, PARTIAL, 0))
        runs = runs_of_grid(kinds.flatten(0, 2).to(torch.int8), 0)
        return packed_views(runs, self.shape[:2], lengths, block_size)

    def _transpose(self) -> MaskViews:
        host = self.on(_HOST)
        if host is not self:
            return host.transposed().on(self.device)
        used = max(0, int(self.offsets[-1, -1, -1])) if self.offsets.numel() else 0
        # The caller of a compiled program may have passed anything, and transposing runs that
        # leave the mask would take any amount of memory.
        check_values(
            self.offsets, self.runs[:used], (self.q_length, self.kv_length), self.block_size
        )
        runs = transpose(unpack(self.offsets, self.runs), self.q_blocks, self.kv_blocks)
        sizes = (self.block_size[1], self.block_size[0])
        return packed_views(runs, self.shape[:2], (self.kv_length, self.q_length), sizes)


def packed_views(
    runs: RunList, grids: tuple[int, ...], lengths: tuple[int, int], block_size: tuple[int, int]
) -> MaskViews:
    """Return the views, on the CPU, of runs in any order.

    Args:
        grids: (B', H').
        lengths, block_size: (q, kv), in elements.
    """
    rows, columns = (block_count(*pair) for pair in zip(lengths, block_size, strict=True))
    return MaskViews(*pack(runs, grids[0], grids[1], rows, columns), *lengths, block_size)
