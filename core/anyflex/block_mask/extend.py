"""Extension of a block mask: blocks that are new, or were ragged, are built and spliced in."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from anyflex.block_mask.elementwise_evaluation import elements_of
from anyflex.block_mask.mask_function import moved, trace_mask_mod
from anyflex.block_mask.mask_state import MaskContent
from anyflex.block_mask.offset_mask_mod import indices_read, shifted_mod, shifted_opaque
from anyflex.block_mask.structure_builder import built_runs, captured_device
from anyflex.errors import BlockMaskError
from anyflex.intervals.evaluation import Domain
from anyflex.mask_structure.device_views import packed_views
from anyflex.mask_structure.run_checks import checked_length
from anyflex.mask_structure.runs import RunList, block_count, cut, joined, unpack_rows
from anyflex.tracing.mod_types import MaskMod
from anyflex.tracing.trace import TracedMod

__all__ = ["build_region", "extended"]

_CPU = torch.device("cpu")

Mask = TypeVar("Mask", bound=MaskContent)


def extended(mask: Mask, kv_len: Any, q_len: Any, mask_mod: MaskMod | None, exact: bool) -> Mask:
    """See `BlockMask.extend`."""
    q_old, kv_old = mask.seq_lengths
    q_new = q_old if q_len is None else _grown("q_len", "Q_LEN", q_len, q_old)
    kv_new = _grown("kv_len", "KV_LEN", kv_len, kv_old)
    traced, opaque = _mod(mask, mask_mod)
    captured_device(traced)
    q_block, kv_block = mask.BLOCK_SIZE
    # Rows and columns of blocks that stay; a ragged last one is decided again.
    rows = block_count(q_old, q_block) if q_new == q_old else q_old // q_block
    columns = block_count(kv_old, kv_block) if kv_new == kv_old else kv_old // kv_block
    ragged = rows * q_block < q_old or columns * kv_block < kv_old
    if ragged and mask._zero_alone is None:
        raise BlockMaskError(
            f"lengths {q_old, kv_old} end inside of a block of {mask.BLOCK_SIZE}, which its "
            "mask mod would have to decide anew, and this mask's structure was not built from its "
            "mask mod: make it with create_block_mask, or with lengths of whole blocks"
        )
    host = mask.views().on(_CPU)
    batch, heads, _ = host.offsets.shape
    new_rows = block_count(q_new, q_block)
    kept = cut(unpack_rows(host.offsets[:, :, : rows + 1], host.runs), columns)
    parts = [_placed(kept, rows, new_rows, 0, 0)]
    on_host = traced if traced is None else moved(traced, _CPU)
    for first_row, first_column, q_end in (
        (0, columns, min(rows * q_block, q_new)),
        (rows, 0, q_new),
    ):
        q_range = (first_row * q_block, q_end)
        kv_range = (first_column * kv_block, kv_new)
        if q_range[0] >= q_end or kv_range[0] >= kv_new:
            continue
        region = build_region(mask, on_host, opaque, exact, q_range, kv_range)
        height = block_count(q_end - q_range[0], q_block)
        parts.append(_placed(region, height, new_rows, first_row, first_column))
    views = packed_views(joined(parts), (batch, heads), (q_new, kv_new), mask.BLOCK_SIZE)
    at_home = traced
    if traced is not None and any(t.device != mask.device for t in traced.captured):
        at_home = moved(traced, mask.device)
    function = mask._mask_mod if mask_mod is None else mask_mod
    return mask._assembled(
        views.on(mask.device),
        at_home,
        opaque,
        function if at_home is traced else None,
        mask._zero_alone,
        mask._asked,
    )


def build_region(
    mask: MaskContent,
    traced: TracedMod | None,
    opaque: MaskMod | None,
    exact: bool,
    q_range: tuple[int, int],
    kv_range: tuple[int, int],
) -> RunList:
    """Return the runs of a rectangle of the score matrix, as `create_block_mask` decides them.

    It is built as a mask of its own, whose indices are shifted to where the rectangle begins.

    Args:
        mask: has the grids and the block size of the result.
        traced, opaque: the mask mod in one of its forms. Captured tensors are on the CPU.
        q_range, kv_range: elements; each begins where a block does.

    Returns:
        Runs whose rows count through batch, head and the rectangle's rows of blocks, and whose
        columns count from the rectangle's first.
    """
    grid = mask.offsets.shape[:2]
    shifts = {"q_idx": q_range[0], "kv_idx": kv_range[0]}
    if traced is not None:
        elements = elements_of(shifted_mod(traced, shifts), None, _CPU)
    else:
        assert opaque is not None
        elements = elements_of(None, shifted_opaque(opaque, shifts), mask.device)
    lengths = (q_range[1] - q_range[0], kv_range[1] - kv_range[0])
    batch, heads = elements.grid(*grid)
    runs = built_runs(elements, Domain(batch, heads, lengths, mask.BLOCK_SIZE), exact)
    views = packed_views(runs, (batch, heads), lengths, mask.BLOCK_SIZE)
    return unpack_rows(views.offsets.expand(*grid, -1), views.runs)


def _placed(runs: RunList, rows: int, new_rows: int, first_row: int, first_column: int) -> RunList:
    """Move a rectangle of `rows` rows of blocks a grid into grids of `new_rows`."""
    grid, row = runs.row // max(rows, 1), runs.row % max(rows, 1)
    return RunList(
        grid * new_rows + row + first_row,
        runs.first + first_column,
        runs.end + first_column,
        runs.kind,
    )


def _grown(name: str, attribute: str, value: Any, old: int) -> int:
    length = checked_length(name, value)
    if length < old:
        raise BlockMaskError(
            f"{name} must be at least the mask's {attribute}, {old}, got {length}; row_slice() "
            "makes a mask shorter"
        )
    return length


def _mod(mask: MaskContent, mask_mod: MaskMod | None) -> tuple[TracedMod | None, MaskMod | None]:
    """Return the mask mod that decides the new blocks, checked against the mask."""
    if mask_mod is None:
        if mask.traced is None and mask.opaque is None:
            raise BlockMaskError(
                "this block mask has no mask_mod, which new blocks are built from: pass mask_mod="
            )
        return mask.traced, mask.opaque
    traced, opaque = trace_mask_mod(mask_mod, mask.device)
    new = indices_read(traced, opaque) - indices_read(mask.traced, mask.opaque)
    for axis, name in enumerate(("b", "h")):
        if name in new and mask.offsets.shape[axis] == 1 and mask.traced is not None:
            raise BlockMaskError(
                f"mask_mod reads {name}, and the mask, whose mask mod didn't, is one for all "
                f"{('batch entries', 'heads')[axis]}: build it anew with create_block_mask"
            )
    return traced, opaque
