"""Serialized form of a block mask for pickle, copy and torch.save: plain data with a version."""

from __future__ import annotations

from typing import Any

from anyflex.block_mask.mask_function import sliced_mask_mod
from anyflex.block_mask.mask_state import MaskContent
from anyflex.errors import BlockMaskError
from anyflex.tracing.trace import TracedMod

__all__ = ["FORMAT", "restore", "state_of"]

FORMAT = 1


def state_of(mask: MaskContent) -> dict[str, Any]:
    """Return the state that `restore` reads."""
    # The traced mask mod has all information; the function itself may not be picklable.
    traced = mask.traced
    return {
        "format": FORMAT,
        "offsets": mask.offsets,
        "runs": mask.runs,
        "seq_lengths": mask.seq_lengths,
        "block_size": mask.BLOCK_SIZE,
        "traced": None
        if traced is None
        else {name: getattr(traced, name) for name in TracedMod.__slots__},
        "opaque": mask.opaque,
        "needs_mask_mod": mask.needs_mask_mod,
        "from_captured": mask._from_captured,
        "zero_alone": mask._zero_alone,
    }


def restore(mask: MaskContent, state: dict[str, Any]) -> None:
    """Fill an empty mask. Raises BlockMaskError for a state of another format."""
    found = state.get("format")
    if found != FORMAT:
        raise BlockMaskError(
            f"this block mask was saved in format {found}, and this version of anyflex reads "
            f"format {FORMAT}: build it anew"
        )
    mask._fill(
        state["offsets"],
        state["runs"],
        state["seq_lengths"],
        state["block_size"],
        None if state["traced"] is None else TracedMod(**state["traced"]),
        state["opaque"],
        sliced_mask_mod if state["needs_mask_mod"] else state["opaque"],
        needs_mask_mod=state["needs_mask_mod"],
        from_captured=state["from_captured"],
        zero_alone=state.get("zero_alone", ()),  # saved by a version without this field
    )
    mask.views()
