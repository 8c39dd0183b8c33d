"""What a block mask holds: a structure and a mask mod, watched, compared, moved and saved."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anyflex.block_mask import serialization
from anyflex.block_mask.equality import same_mod, same_structure, structure_hash
from anyflex.block_mask.mask_function import (
    MaskMod,
    OpaqueMask,
    RebuiltMaskMod,
    captured_name,
    moved,
    trace_mask_mod,
)
from anyflex.block_mask.rebuilt import can_be_read, check_reads, checked_structure
from anyflex.block_mask.watch import Watch
from anyflex.errors import BlockMaskError
from anyflex.frontend.arguments import refuse_assigned
from anyflex.mask_structure import views_registry
from anyflex.mask_structure.device_views import MaskViews
from anyflex.mask_structure.run_checks import check_types, checked_device, checked_lengths
from anyflex.mask_structure.structure_queries import BlockStructure
from anyflex.process.fork_safe_locks import free_in_child
from anyflex.tensors.dynamo_disabled import outside_graphs
from anyflex.tracing.trace import TracedMod

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MaskContent"]

# One lock for all masks: it is held only while a mask is looked at for the first time, and an
# object with a lock of its own could not be made under torch.compile.
_LOCK = threading.RLock()
free_in_child(sys.modules[__name__], "_LOCK")

_STRUCTURE = ("offsets", "runs")


class MaskContent(BlockStructure):
    """The base of `BlockMask`: its content, checked against change; attributes as there."""

    # Plain attributes, as the structure has: a call reads them under torch.compile.
    traced: TracedMod | None
    opaque: OpaqueMask | None
    needs_mask_mod: bool

    def _fill(
        self,
        offsets: Tensor,
        runs: Tensor,
        seq_lengths: tuple[int, int],
        block_size: tuple[int, int],
        traced: TracedMod | None,
        opaque: OpaqueMask | None,
        mask_mod: MaskMod | None,
        *,
        needs_mask_mod: bool = False,
        from_captured: bool = False,
        zero_alone: tuple[str, ...] = (),
        unchecked: bool = False,
    ) -> None:
        self.offsets = offsets
        self.runs = runs
        self.seq_lengths = seq_lengths
        self.BLOCK_SIZE = block_size
        self.traced = traced
        self.opaque = opaque
        self.needs_mask_mod = needs_mask_mod
        self._mask_mod = mask_mod
        # Whether the parts are leaves of a pytree, which may be anything, and nobody has looked.
        self._unchecked = unchecked
        # Whether the structure was computed from the mask mod and its captured tensors' values,
        # so that both say the same of every element.
        self._from_captured = from_captured
        # Of b and h those that the mask mod reads, and whose first value alone the structure was
        # computed for.
        self._zero_alone = zero_alone
        self._structure: MaskViews | None = None
        self._watch: Watch | None = None
        self._moved: dict[torch.device, Any] = {}
        self._hash: int | None = None

    @classmethod
    def _assembled(cls, *parts: Any, **flags: Any) -> Self:
        """Make a mask of parts that need no check, or are `unchecked`; arguments of `_fill`."""
        mask = cls.__new__(cls)
        mask._fill(*parts, **flags)
        return mask

    def _check_parts(self) -> None:
        """Look at what a map over a pytree has left of the mask, in full once. Raises
        BlockMaskError if it is no mask any more."""
        whole = can_be_read(self.offsets, self.runs)
        if whole:
            lengths = checked_lengths(self.seq_lengths)
            self.offsets, self.runs = checked_structure(
                self.offsets, self.runs, lengths, self.BLOCK_SIZE
            )
        else:
            check_types(self.offsets, self.runs, " of block_mask")
        if self.traced is not None:
            check_reads(self.traced)
        self._unchecked = not whole

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
            sizes = (*self.offsets.shape[:2], *self.seq_lengths)
            traced, opaque = trace_mask_mod(function, self.device, sizes=sizes)
        with _LOCK:
            self._mask_mod, self.traced, self.opaque = function, traced, opaque
            self.needs_mask_mod = False
            self._from_captured = False
            self._zero_alone = ()
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
            refuse_assigned()
        return structure if device is None else structure.on(device)

    def unchanged_structure(self) -> MaskViews:
        """Return `views` where only a change of offsets and runs matters, not one of captured
        values. Raises as that does."""
        if self._structure is None or self._watch is None:
            return self.views()
        self._watch.check(_STRUCTURE)
        if self._structure.offsets is not self.offsets or self._structure.runs is not self.runs:
            refuse_assigned()
        return self._structure

    def _start_watching(self) -> MaskViews:
        with _LOCK:
            if self._unchecked:
                self._check_parts()
            if self._structure is None:
                self._structure = MaskViews(
                    self.offsets, self.runs, *self.seq_lengths, self.BLOCK_SIZE
                )
            if self._watch is None:
                watch = Watch()
                for name in _STRUCTURE:
                    watch.add(name, getattr(self, name))
                mod = self.opaque if self.traced is None else self.traced
                if mod is not None:
                    read = mod.captured if isinstance(mod, TracedMod) else mod.tensors
                    for position, tensor in enumerate(read):
                        # Values matter only to a structure that was computed from them.
                        name = captured_name(mod, position)
                        watch.add(name, tensor, values=self._from_captured)
                self._watch = watch
                self._structure = views_registry.shared(self._structure)
                if self._from_captured and self.traced is not None and self.traced.captured:
                    views_registry.watch(self._structure, watch)
            return self._structure

    def on(self, device: torch.device) -> Self:
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
        kept: Self = found
        return kept

    def _is_on(self, device: torch.device) -> bool:
        if self.offsets.device != device:
            return False
        if self.traced is not None:
            for tensor in self.traced.captured:  # on the hot path: no generator
                if tensor.device != device:
                    return False
        return True

    def to(self, device: torch.device | str | int) -> Self:
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
            zero_alone=self._zero_alone,
        )
        copy._structure = structure
        copy.views()
        return copy

    @outside_graphs
    def __eq__(self, other: object) -> bool:
        """Same lengths, block size, blocks and mask mod: its graph, numbers and captured values,
        or the same function where it could not be traced. The device and the room that `runs` has
        for more don't count. Raises BlockMaskError if a mask was changed in place."""
        if not isinstance(other, MaskContent):
            return NotImplemented
        if self is other:
            return True
        return (
            self.needs_mask_mod == other.needs_mask_mod
            and self.opaque == other.opaque
            and same_structure(self.views(), other.views())
            and same_mod(self.traced, other.traced)
        )

    @outside_graphs
    def __hash__(self) -> int:
        # Of the structure alone: mask_mod may be assigned, and values may be on a device.
        if self._hash is None:
            self._hash = structure_hash(self.views())
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return serialization.state_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        serialization.restore(self, state)
