"""State of a block mask: its structure and its mask mod, moved, compared and saved."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anyflex.block_mask.equality import same_mod, same_structure, structure_hash
from anyflex.block_mask.mask_function import (
    RebuiltMaskMod,
    check_reads,
    moved,
    sliced_mask_mod,
    trace_mask_mod,
)
from anyflex.errors import BlockMaskError
from anyflex.mask_structure import views_registry
from anyflex.mask_structure.device_views import MaskViews
from anyflex.mask_structure.run_checks import check_structure, checked_device, checked_lengths
from anyflex.mask_structure.runs import block_count
from anyflex.mask_structure.structure_queries import BlockStructure
from anyflex.tensors.dynamo_disabled import outside_graphs
from anyflex.tensors.torch_versions import dispatch_modes, version_counter
from anyflex.tracing.mod_types import MaskMod
from anyflex.tracing.trace import TracedMod

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FORMAT", "MaskContent"]

FORMAT = 2
"""Version of the state that pickle, copy and torch.save are given."""


class MaskContent(BlockStructure):
    """The base of `BlockMask`: structure, mask mod, copies on other devices; attributes as there.

    A mask is frozen but for `mask_mod`, and for `seq_lengths` that end inside of the same blocks.
    It is checked once: where a user builds it, or, if it was rebuilt from the leaves of a pytree,
    at its first use.
    """

    # Plain attributes: a call reads them under torch.compile.
    traced: TracedMod | None
    opaque: MaskMod | None
    needs_mask_mod: bool
    _mask_mod: MaskMod | None
    # The mark of the views where the mask was built inside of a compiled graph: see
    # `anyflex.mask_structure.views_registry`.
    mark: Tensor | None
    # Indices ("b", "h") that the mask mod reads although the structure was built for 0 only. None
    # where the structure wasn't computed from the mask mod: they needn't agree then.
    _zero_alone: tuple[str, ...] | None
    # B and H as `create_block_mask` was asked for them; None where they are B' and H'.
    _asked: tuple[int, int] | None
    # Structure for kernels where the mask is; None until it was checked.
    known_views: MaskViews | None
    # For each device the captured tensors' version counters and the copy made of them.
    _moved: dict[torch.device, tuple[list[int], Any]]
    _hash: int | None

    def _fill(
        self,
        offsets: Tensor,
        runs: Tensor,
        seq_lengths: tuple[int, int],
        block_size: tuple[int, int],
        traced: TracedMod | None,
        opaque: MaskMod | None,
        mask_mod: MaskMod | None,
        zero_alone: tuple[str, ...] | None = None,
        asked: tuple[int, int] | None = None,
        mark: Tensor | None = None,
    ) -> None:
        # Past `__setattr__`, which refuses to change the first four. Each attribute would take it
        # two calls of Python, a third of what a step of decoding spends on its mask.
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "runs", runs)
        object.__setattr__(self, "seq_lengths", seq_lengths)
        object.__setattr__(self, "BLOCK_SIZE", block_size)
        object.__setattr__(self, "traced", traced)
        object.__setattr__(self, "opaque", opaque)
        object.__setattr__(self, "needs_mask_mod", mask_mod is sliced_mask_mod)
        object.__setattr__(self, "_mask_mod", mask_mod)
        object.__setattr__(self, "mark", mark)
        object.__setattr__(self, "_zero_alone", zero_alone)
        object.__setattr__(self, "_asked", asked)
        object.__setattr__(self, "known_views", None)
        object.__setattr__(self, "_moved", {})
        object.__setattr__(self, "_hash", None)

    @classmethod
    def _assembled(
        cls,
        views: MaskViews,
        traced: TracedMod | None = None,
        opaque: MaskMod | None = None,
        mask_mod: MaskMod | None = None,
        zero_alone: tuple[str, ...] | None = None,
        asked: tuple[int, int] | None = None,
    ) -> Self:
        """Make a mask of parts that are known to be right."""
        sizes = (views.q_length, views.kv_length), views.block_size
        mask = cls._unchecked(
            views.offsets, views.runs, *sizes, traced, opaque, mask_mod, zero_alone, asked
        )
        object.__setattr__(mask, "known_views", views_registry.shared(views))
        return mask

    @classmethod
    def _unchecked(cls, *parts: Any) -> Self:
        """Make a mask of parts that its first use will check, see `_fill`; Dynamo traces this."""
        mask = cls.__new__(cls)
        mask._fill(*parts)
        return mask

    def __getstate__(self) -> dict[str, Any]:
        # The traced mask mod has all information; the function itself may not be picklable.
        traced = self.traced
        return {
            "format": FORMAT,
            "offsets": self.offsets,
            "runs": self.runs,
            "seq_lengths": self.seq_lengths,
            "block_size": self.BLOCK_SIZE,
            "traced": traced and {name: getattr(traced, name) for name in TracedMod.__slots__},
            "opaque": self.opaque,
            "needs_mask_mod": self.needs_mask_mod,
            "alone": self._zero_alone,
            "asked": self._asked,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        found = state.get("format")
        if found != FORMAT:
            raise BlockMaskError(
                f"this block mask was saved in format {found}, and this version of anyflex reads "
                f"format {FORMAT}: build it anew"
            )
        self._fill(
            state["offsets"],
            state["runs"],
            state["seq_lengths"],
            state["block_size"],
            state["traced"] and TracedMod(**state["traced"]),
            state["opaque"],
            sliced_mask_mod if state["needs_mask_mod"] else state["opaque"],
            state["alone"],
            state.get("asked"),  # which older states of this format lack
        )
        self.views()

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "seq_lengths":
            super().__setattr__(name, value)
            return
        views, lengths = self.views(), checked_lengths(value)
        shorter = dataclasses.replace(views, q_length=lengths[0], kv_length=lengths[1])
        blocks = (views.q_blocks, views.kv_blocks)
        if (block_count(lengths[0], self.BLOCK_SIZE[0]), shorter.kv_blocks) != blocks or any(
            new > old for new, old in zip(lengths, self.seq_lengths, strict=True)
        ):
            raise BlockMaskError(
                f"seq_lengths {self.seq_lengths} may only shrink within the last blocks, to the "
                f"lengths of a call, got {lengths}: row_slice() makes a mask shorter, extend() "
                "longer"
            )
        object.__setattr__(self, "seq_lengths", lengths)
        self.known_views, self._hash = views_registry.shared(shorter), None
        self._moved.clear()

    @property
    def mask_mod(self) -> MaskMod | None:
        """The mask mod of the PARTIAL blocks; assigning traces it. The structure doesn't
        change."""
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
            traced, opaque = trace_mask_mod(function, self.device)
        self._mask_mod, self.traced, self.opaque = function, traced, opaque
        self.needs_mask_mod = False
        self._zero_alone = None
        self._moved.clear()

    def views(self, device: torch.device | None = None) -> MaskViews:
        """Return the structure for kernels on `device` (default: the mask's), copied once.

        Raises BlockMaskError if the mask was rebuilt from a pytree whose leaves were exchanged for
        others than copies.
        """
        views = self.known_views
        if views is None:
            views = self._checked_views()
            if dispatch_modes() == 0:  # a mode sees each look: values weren't looked at
                self.known_views = views
        return views if device is None else views.on(device)

    def _checked_views(self) -> MaskViews:
        offsets, runs = self.offsets, self.runs
        lengths = checked_lengths(self.seq_lengths)
        check_structure(offsets, runs, lengths, self.BLOCK_SIZE)
        if self.traced is not None:
            check_reads(self.traced)
        views = MaskViews(offsets.contiguous(), runs.contiguous(), *lengths, self.BLOCK_SIZE)
        return views_registry.shared(views)

    def on(self, device: torch.device) -> Self:
        """Return this mask on `device`, its captured tensors included. The copy is kept, and made
        again when a captured tensor has been changed in place since. It isn't kept where one was
        made under inference mode, which counts no changes."""
        if self.known_views is None:
            self.views()
        if self._is_on(device):
            return self
        captured = self.traced.captured if self.traced is not None else ()
        if any(tensor.is_inference() for tensor in captured):
            return self.to(device)
        versions = [version_counter(tensor) for tensor in captured]
        kept = self._moved.get(device)
        if kept is None or kept[0] != versions:
            kept = self._moved[device] = versions, self.to(device)
        copy: Self = kept[1]
        return copy

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
        traced = self.traced
        return self._assembled(
            self.views().on(target),
            moved(traced, target) if traced is not None else None,
            self.opaque,
            self._mask_mod if traced is None or not traced.captured else None,
            self._zero_alone,
            self._asked,
        )

    @outside_graphs
    def __eq__(self, other: object) -> bool:
        """Same lengths, block size, blocks and mask mod: its graph, numbers and captured values,
        or the same function where it could not be traced. The device, the room that `runs` has
        for more and the B and H that stand for one B' and H' don't count."""
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
        # Hash of the structure alone: mask_mod may be assigned, and values may be on a device.
        if self._hash is None:
            self._hash = structure_hash(self.views())
        return self._hash
