"""Views of runs that a user gives, checked."""

from __future__ import annotations

from torch import Tensor

from anyflex.errors import BlockMaskError
from anyflex.mask_structure.device_views import MaskViews, packed_views
from anyflex.mask_structure.run_checks import check_form, check_values, refuse_meta, row_name
from anyflex.mask_structure.runs import PARTIAL, unpack

__all__ = ["views_of_runs"]


def views_of_runs(
    offsets: Tensor,
    runs: Tensor,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    has_mod: bool,
    capacity: int | None,
) -> MaskViews:
    """Return the views on the CPU, in copies, of what `BlockMask.from_runs` is given; raises as it
    does.

    Args:
        has_mod: there is a mask mod, which PARTIAL runs need.
    """
    check_form(offsets, runs, lengths, block_size)
    refuse_meta("offsets", offsets)
    given = (offsets.cpu(), runs.cpu())
    check_values(*given, lengths, block_size)
    listed = unpack(*given)
    partial = (listed.kind == PARTIAL).nonzero()
    if not has_mod and partial.numel():
        raise BlockMaskError(
            f"{row_name(given[0], int(partial[0]))} has a PARTIAL run and there is no "
            "mask_mod; pass mask_mod=, noop_mask if every element is live, or make it FULL"
        )
    if capacity is not None and capacity < listed.row.numel():
        raise BlockMaskError(
            f"capacity must be at least the number of runs, {listed.row.numel()}, got {capacity}"
        )
    return packed_views(listed, offsets.shape[:2], lengths, block_size)
