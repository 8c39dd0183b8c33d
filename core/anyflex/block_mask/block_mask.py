"""BlockMask: which blocks of the score matrix are visited, and how. Format 1."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anyflex.block_mask import pytree, saved_form, slicing
from anyflex.block_mask.combine import noop_mask
from anyflex.block_mask.index_lists import runs_of_lists
from anyflex.block_mask.mask_function import (
    MaskMod,
    RebuiltMaskMod,
    captured_name,
    moved,
    same_mod,
    sliced_mask_mod,
    trace_mask_mod,
)
from anyflex.block_mask.run_checks import (
    check_runs,
    checked_block_size,
    checked_device,
    checked_lengths,
    row_name,
)
from anyflex.block_mask.runs import PARTIAL, block_count, pack, padded, unpack
from anyflex.block_mask.structure import BlockStructure
from anyflex.block_mask.views import MaskViews
from anyflex.block_mask.watch import Watch
from anyflex.errors import BlockMaskError
from anyflex.mod_graph.trace import TracedMod

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BlockMask"]

# One lock for all masks: it is held only while a mask is looked at for the first time, and an
# object with a lock of its own could not be made under torch.compile.
_LOCK = threading.RLock()


class BlockMask(BlockStructure):
    """For each row of blocks a short list of runs of kv blocks, FULL or PARTIAL.

    Structure wins: in FULL blocks the mask mod is not applied, blocks that no run covers are not
    visited, whatever the mask mod says. FULL means that every element inside the lengths is live.
    Made by `create_block_mask`, `from_runs`, `from_kv_blocks` or `from_torch`.

    Attributes:
        offsets: int32 [B', H', Qb + 1]; the runs of row r are ``runs[offsets[r]:offsets[r + 1]]``.
            B' and H' are 1 where the mask is the same for all batch entries or heads.
        runs: int32 [n, 3]: first block, end block (excluded), kind; n may exceed ``offsets[-1]``.
        seq_lengths: (Q_LEN, KV_LEN) in elements.
        BLOCK_SIZE: (q, kv) in elements.
        traced: the mask mod as plain data, or None.
        opaque: a mask mod that could not be traced but is pure, or None.
        needs_mask_mod: there are PARTIAL runs and no mask mod: a slice, to which `mask_mod` must
            be assigned before it is used.
    """

    # Plain attributes, as the structure has: a call reads them under torch.compile.
    traced: TracedMod | None
    opaque: MaskMod | None
    needs_mask_mod: bool

    def __init__(
        self,
        offsets: Tensor,
        runs: Tensor,
        *,
        seq_lengths: tuple[int, int],
        block_size: int | tuple[int, int] = 128,
        mask_mod: MaskMod | None = None,
        capacity: int | None = None,
    ) -> None:
        """Check and take a mask's runs; arguments and errors as for `from_runs`."""
        lengths, sizes = checked_lengths(seq_lengths), checked_block_size(block_size)
        check_runs(offsets, runs, lengths, sizes)
        listed = unpack(offsets.cpu(), runs.cpu())
        partial = (listed.kind == PARTIAL).nonzero()
        if mask_mod is None and partial.numel():
            raise BlockMaskError(
                f"{row_name(offsets.cpu(), int(partial[0]))} has a PARTIAL run and there is no "
                "mask_mod; pass mask_mod=, noop_mask if every element is live, or make it FULL"
            )
        columns = block_count(lengths[1], sizes[1])
        batch, heads, edges = offsets.shape
        merged = pack(listed, batch, heads, edges - 1, columns)
        if not torch.equal(merged[0], offsets.cpu()):
            offsets, runs = (tensor.to(offsets.device) for tensor in merged)
        if capacity is not None and capacity < listed.row.numel():
            raise BlockMaskError(
                f"capacity must be at least the number of runs, {listed.row.numel()}, got "
                f"{capacity}"
            )
        runs = padded(runs.contiguous(), capacity or 0)
        traced, opaque = (None, None) if mask_mod is None else trace_mask_mod(mask_mod)
        self._fill(offsets.contiguous(), runs, lengths, sizes, traced, opaque, mask_mod)
        self.views()

    def _fill(
        self,
        offsets: Tensor,
        runs: Tensor,
        seq_lengths: tuple[int, int],
        block_size: tuple[int, int],
        traced: TracedMod | None,
        opaque: MaskMod | None,
        mask_mod: MaskMod | None,
        *,
        needs_mask_mod: bool = False,
        from_captured: bool = False,
    ) -> None:
        self.offsets = offsets
        self.runs = runs
        self.seq_lengths = seq_lengths
        self.BLOCK_SIZE = block_size
        self.traced = traced
        self.opaque = opaque
        self.needs_mask_mod = needs_mask_mod
        self._mask_mod = mask_mod
        # Whether the structure was computed from the captured tensors' values.
        self._from_captured = from_captured
        self._structure: MaskViews | None = None
        self._watch: Watch | None = None
        self._moved: dict[torch.device, BlockMask] = {}

    @classmethod
    def _assembled(cls, *parts: Any, **flags: Any) -> Self:
        """Make a mask of parts that need no check; arguments of `_fill`."""
        mask = cls.__new__(cls)
        mask._fill(*parts, **flags)
        return mask

    @classmethod
    def from_runs(
        cls,
        offsets: Tensor,
        runs: Tensor,
        *,
        seq_lengths: tuple[int, int],
        block_size: int | tuple[int, int] = 128,
        mask_mod: MaskMod | None = None,
        capacity: int | None = None,
    ) -> Self:
        """Return the mask of these runs.

        >>> offsets = torch.tensor([[[0, 1, 3]]], dtype=torch.int32)
        >>> runs = torch.tensor([[0, 1, 2], [0, 1, 1], [1, 2, 2]], dtype=torch.int32)
        >>> causal = lambda b, h, q, k: q >= k
        >>> BlockMask.from_runs(offsets, runs, seq_lengths=(256, 256), mask_mod=causal).sparsity()
        25.0

        Args:
            offsets: int32 [B', H', Qb + 1], ending with n.
            runs: int32 [n, 3] on the same device: first block, end block, FULL or PARTIAL;
                increasing and disjoint in each row. Neighbours of one kind are merged.
            seq_lengths: (Q_LEN, KV_LEN).
            block_size: int, or (q, kv).
            mask_mod: needed if there is a PARTIAL run.
            capacity: rows that `runs` shall have at least, for masks rewritten in place.

        Raises:
            BlockMaskError: naming the row, run or position that is wrong.
        """
        return cls(
            offsets,
            runs,
            seq_lengths=seq_lengths,
            block_size=block_size,
            mask_mod=mask_mod,
            capacity=capacity,
        )

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | bool | None = None,
    ) -> Self:
        """Return the mask of torch's index lists: torch's arguments, torch's meaning.

        Args:
            kv_num_blocks, kv_indices: [B', H', Qb] and [B', H', Qb, width], int32 or int64:
                PARTIAL blocks of each row, in any order. B' and H' may be left out.
            full_kv_num_blocks, full_kv_indices: FULL blocks, both or neither.
            mask_mod: None means that every element of the PARTIAL blocks is live.
            seq_lengths: None means whole blocks: Qb and `width` of them.
            compute_q_blocks, dq_write_order, dq_write_order_full, dq_kv_order: accepted for
                torch's sake. The transpose is made when it is needed, and deterministic gradients
                need no order.

        Raises:
            BlockMaskError: naming the row and block that is wrong.
        """
        offsets, runs, lengths, sizes = runs_of_lists(
            kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, BLOCK_SIZE, seq_lengths
        )
        mask = cls._assembled(offsets, runs, lengths, sizes, None, None, None)
        if mask_mod is sliced_mask_mod:
            mask._mask_mod = mask_mod
            mask.needs_mask_mod = mask.has_partial()
        elif mask_mod is not None or mask.has_partial():
            mask.mask_mod = noop_mask if mask_mod is None else mask_mod
        mask.views()
        return mask

    @classmethod
    def from_torch(cls, mask: Any) -> Self:
        """Return what a ``torch.nn.attention.flex_attention.BlockMask`` means.

        Raises ArgumentTypeError if it is something else, BlockMaskError if it is damaged or of a
        torch version whose masks hold more than this version of anyflex knows.
        """
        from anyflex.block_mask.torch_format import torch_fields

        return cls.from_kv_blocks(**torch_fields(mask))

    def to_torch(self) -> Any:
        """Return torch's BlockMask: the lists that its create_block_mask makes.

        A FULL block that reaches past the lengths becomes PARTIAL, as torch has it.
        """
        from anyflex.block_mask.torch_format import torch_mask

        return torch_mask(self)

    @property
    def mask_mod(self) -> MaskMod | None:
        """The mask mod of the PARTIAL blocks; assigning traces it. Structure stays as it is."""
        if self._mask_mod is None and self.traced is not None:
            return RebuiltMaskMod(self.traced)
        return self._mask_mod

    @mask_mod.setter
    def mask_mod(self, function: MaskMod | None) -> None:
        if function is None:
            if self.has_partial():
                raise BlockMaskError(
                    "mask_mod can't be None: there are PARTIAL runs; assign noop_mask if every "
                    "element of them is live"
                )
            traced, opaque = None, None
        else:
            traced, opaque = trace_mask_mod(function)
        with _LOCK:
            self._mask_mod, self.traced, self.opaque = function, traced, opaque
            self.needs_mask_mod = False
            self._from_captured = False
            self._watch = None
            self._moved.clear()

    def views(self, device: torch.device | None = None) -> MaskViews:
        """Return the structure for kernels on `device` (default: the mask's), copied once.

        Raises BlockMaskError if a tensor of the mask was changed in place or resized since.
        """
        structure = self._structure
        if structure is None or self._watch is None:
            structure = self._start_watching()
        else:
            self._watch.check()
        if structure.offsets is not self.offsets or structure.runs is not self.runs:
            raise BlockMaskError(
                "offsets or runs of this block mask were assigned; build a new one with from_runs"
            )
        return structure if device is None else structure.on(device)

    def _start_watching(self) -> MaskViews:
        with _LOCK:
            if self._structure is None:
                self._structure = MaskViews(
                    self.offsets, self.runs, *self.seq_lengths, self.BLOCK_SIZE
                )
            if self._watch is None:
                watch = Watch()
                watch.add("offsets", self.offsets)
                watch.add("runs", self.runs)
                if self.traced is not None:
                    for position, tensor in enumerate(self.traced.captured):
                        # Values matter only to a structure that was computed from them.
                        name = captured_name(self.traced, position)
                        watch.add(name, tensor, values=self._from_captured)
                self._watch = watch
            return self._structure

    def on(self, device: torch.device) -> BlockMask:
        """Return this mask on `device`, its captured tensors included, moved once and kept."""
        if self.offsets.device == device and (
            self.traced is None or not self.traced.captured or self._is_on(device)
        ):
            return self
        self.views()  # a copy is stale if this mask was changed
        found = self._moved.get(device)
        if found is None:
            with _LOCK:
                found = self._moved.get(device)
                if found is None:
                    found = self._moved[device] = self.to(device)
        return found

    def _is_on(self, device: torch.device) -> bool:
        if self.offsets.device != device:
            return False
        if self.traced is not None:
            for tensor in self.traced.captured:  # on the hot path: no generator
                if tensor.device != device:
                    return False
        return True

    def to(self, device: torch.device | str | int) -> BlockMask:
        """Return the mask, its captured tensors included, on `device`; itself if it is there."""
        target = checked_device(device)
        if self._is_on(target):
            return self
        if self.device.type == "meta":
            raise BlockMaskError(
                f"this block mask is on meta, where it has no values, and can't move to {target}"
            )
        structure = self.views().on(target)
        traced = self.traced
        copy = self._assembled(
            structure.offsets,
            structure.runs,
            self.seq_lengths,
            self.BLOCK_SIZE,
            moved(traced, target) if traced is not None else None,
            self.opaque,
            self._mask_mod if traced is None or not traced.captured else None,
            needs_mask_mod=self.needs_mask_mod,
            from_captured=self._from_captured,
        )
        copy._structure = structure
        return copy

    def __getitem__(self, index: Any) -> Self:
        """Return the mask of chosen batch entries, heads and rows of q blocks.

        Up to three indices: ints (the dimension stays, with length 1), slices, or one vector of
        positions. Chosen rows are packed: they become rows 0, 1, ... and Q_LEN is theirs. kv is
        never sliced. The mask mod is kept where it would see the same indices; else `mask_mod`
        must be assigned before the slice is used. Raises BlockMaskError for an index out of range.
        """
        offsets, runs, q_length, shifted = slicing.select(self, index)
        traced, opaque, mask_mod = self.traced, self.opaque, self._mask_mod
        needs = self.needs_mask_mod
        if shifted and not needs:
            partial = unpack(offsets.cpu(), runs.cpu()).kind == PARTIAL
            traced, opaque, mask_mod = None, None, sliced_mask_mod
            needs = bool(partial.any())
        sliced = self._assembled(
            offsets,
            runs,
            (q_length, self.seq_lengths[1]),
            self.BLOCK_SIZE,
            traced,
            opaque,
            mask_mod,
            needs_mask_mod=needs,
            from_captured=self._from_captured,
        )
        sliced.views()
        return sliced

    def __repr__(self) -> str:
        return (
            f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, "
            f"runs={int(self.runs.shape[0])}, device={str(self.offsets.device)!r}, "
            f"mask_mod={getattr(self._mask_mod, '__name__', self.mask_mod)})"
        )

    def __eq__(self, other: object) -> bool:
        """Same device, lengths, block size, blocks, and mask mod, captured values included."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        return (
            self.seq_lengths == other.seq_lengths
            and self.BLOCK_SIZE == other.BLOCK_SIZE
            and self.device == other.device
            and self.needs_mask_mod == other.needs_mask_mod
            and self.opaque is other.opaque
            and torch.equal(self.offsets, other.offsets)
            and all(
                torch.equal(a, b)
                for a, b in zip(
                    unpack(self.offsets.cpu(), self.runs.cpu()),
                    unpack(other.offsets.cpu(), other.runs.cpu()),
                    strict=True,
                )
            )
            and same_mod(self.traced, other.traced)
        )

    def __hash__(self) -> int:
        return hash((self.seq_lengths, self.BLOCK_SIZE, tuple(self.offsets.shape)))

    def __getstate__(self) -> dict[str, Any]:
        return saved_form.state_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved_form.restore(self, state)


pytree.register(BlockMask)
# A mask's state is plain data: torch.load takes it under weights_only=True, and so does
# torch.export.load as part of a program's example inputs.
torch.serialization.add_safe_globals([BlockMask])
