"""The structure of a range of rows of a block mask, which need not begin where a block does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflex.block_mask.mask_state import MaskContent
from anyflex.block_mask.offset_mask_mod import indices_read
from anyflex.errors import BlockMaskError
from anyflex.mask_structure.device_views import MaskViews, packed_views
from anyflex.mask_structure.run_checks import checked_length
from anyflex.mask_structure.runs import (
    PARTIAL,
    block_count,
    cut,
    expand_rows,
    padded,
    runs_of_grid,
    unpack_rows,
)

__all__ = ["checked_rows", "row_range", "row_views", "sliced_rows"]

_CPU = torch.device("cpu")


def sliced_rows(
    mask: MaskContent, start: Any, stop: Any, kv_len: Any
) -> tuple[MaskViews, dict[str, int | Tensor]]:
    """Return the structure of `BlockMask.row_slice`, and the shifts that map its indices to those
    of the whole mask. Raises BlockMaskError."""
    start, stop, kv_length = checked_rows(mask.seq_lengths, start, stop, kv_len)
    decided = mask._zero_alone is not None
    views = row_views(mask.views(), start, stop, kv_length, decided=decided)
    reads = indices_read(mask.traced, mask.opaque)
    # Also for a start of 0, so that it shares its graph with the slices that follow.
    return views, {"q_idx": start} if "q_idx" in reads else {}


def checked_rows(
    lengths: tuple[int, int], start: Any, stop: Any, kv_len: Any
) -> tuple[int, int, int]:
    """Return the arguments of `BlockMask.row_slice` as ints, `kv_len` None as KV_LEN. Raises
    BlockMaskError."""
    q_length, kv_length = lengths
    start, stop = checked_length("start", start), checked_length("stop", stop)
    if not start <= stop <= q_length:
        raise BlockMaskError(
            f"rows {start}:{stop} are no range of the mask's {q_length} rows; 0 <= start <= stop "
            f"<= {q_length} is required. extend() makes a mask longer"
        )
    if kv_len is not None:
        kv_len = checked_length("kv_len", kv_len)
        if kv_len > kv_length:
            raise BlockMaskError(
                f"kv_len {kv_len} is more than the mask's KV_LEN {kv_length}: use extend()"
            )
        kv_length = kv_len
    return start, stop, kv_length


def row_views(
    views: MaskViews, start: int, stop: int, kv_length: int, *, decided: bool
) -> MaskViews:
    """Return the structure of `row_range`.

    Args:
        decided: the structure was built from the mask mod, which can tell what a block made of
            blocks of two kinds holds.

    Raises:
        BlockMaskError: there is such a block, and it can't.
    """
    found, place = row_range(views, start, stop, kv_length)
    if place is not None and not decided:
        raise BlockMaskError(
            f"rows {start}:{stop} begin inside of a block of {views.block_size[0]} rows, so that "
            f"row {list(place)} of blocks has a block made of two that differ in kind. Its mask "
            "mod would have to decide it, and this mask's structure was not built from its mask "
            "mod: begin where a block does, or make the mask with create_block_mask"
        )
    return found


def row_range(
    views: MaskViews, start: int, stop: int, kv_length: int
) -> tuple[MaskViews, tuple[int, int, int] | None]:
    """Return the structure of rows start..stop and keys 0..kv_length, all in elements.

    A block of it is FULL if all the blocks that its rows come from are, not visited if none of
    them is, else PARTIAL. Where every block's rows come from one block (`start` is a multiple of
    the block size, or one block is all there is) rows are copied on the device that they are on,
    without waiting for it; else they are combined on the host. Copied rows are kept until others
    are asked for: steps of decoding in one block differ in the mask mod's number alone.

    Returns:
        (views, place): place [b, h, block of rows] of a block made of blocks that differ in kind,
        or None where there is none. Only the mask mod can tell what such a block holds.
    """
    block = views.block_size[0]
    first = start // block
    end = block_count(stop, block) if stop > start else first
    # Whether each block's rows come from one block.
    whole = start % block == 0 or end - first <= 1
    host = views.on(_CPU)
    same_columns = kv_length == views.kv_length
    if same_columns and whole:
        sizes = (stop - start, kv_length, views.block_size)

        def copied() -> MaskViews:
            taken = _copied_rows(host, host, first, end, sizes)
            if views is host:
                return taken
            return _copied_rows(views, host, first, end, sizes).with_copy(taken)

        return views.newest("rows", (first, end, stop - start), copied), None
    columns = block_count(kv_length, views.block_size[1])
    lengths = (stop - start, kv_length)
    if not whole:
        return _combined_rows(views, host, first, end, lengths)

    def cut_off() -> MaskViews:
        sources = cut(unpack_rows(host.offsets[:, :, first : end + 1], host.runs), columns)
        made = packed_views(sources, host.shape[:2], lengths, views.block_size)
        return made.on(views.device)

    # A cache that grows inside of a block of keys changes the length alone.
    kept = views.newest("cut rows", (first, end, stop - start, columns), cut_off)
    return kept.with_kv_length(kv_length), None


def _combined_rows(
    views: MaskViews, host: MaskViews, first: int, end: int, lengths: tuple[int, int]
) -> tuple[MaskViews, tuple[int, int, int] | None]:
    """Return `row_range` of rows that begin inside of a block: each block of theirs is made of two
    of rows first..end."""
    batch, heads, _ = host.shape
    columns = block_count(lengths[1], views.block_size[1])
    sources = unpack_rows(host.offsets[:, :, first : end + 1], host.runs)
    if lengths[1] != views.kv_length:
        sources = cut(sources, columns)
    kinds = expand_rows(sources, batch * heads * (end - first), columns)
    kinds = kinds.view(batch, heads, end - first, columns)
    rows = block_count(lengths[0], views.block_size[0])
    # Each row of blocks lies over two, the last one perhaps over one alone.
    upper, lower = kinds[:, :, :rows], kinds[:, :, 1 : rows + 1]
    lower = torch.cat([lower, upper[:, :, lower.shape[2] :]], 2)
    differ = (upper != lower).nonzero()
    place = None
    if differ.numel():
        b, h, row, _ = differ[0].tolist()
        place = (b, h, row)
    grid = torch.where(upper == lower, upper, PARTIAL).flatten(0, 2)
    runs = runs_of_grid(grid.to(torch.int8), 0)
    made = packed_views(runs, (batch, heads), lengths, views.block_size)
    return made.on(views.device), place


def _copied_rows(
    views: MaskViews,
    host: MaskViews,
    first: int,
    end: int,
    sizes: tuple[int, int, tuple[int, int]],
) -> MaskViews:
    """Return rows of blocks first..end of `views`; `host` has their number without asking a
    device."""
    edges = views.offsets[:, :, first : end + 1]
    batch, heads, _ = edges.shape
    if batch * heads == 1:
        begin, last = int(host.offsets[0, 0, first]), int(host.offsets[0, 0, end])
        # Copied, not shared: a kernel may be compiled for the alignment of a tensor's first
        # element.
        runs = padded(views.runs[begin:last])
        return MaskViews(edges - begin, runs if last - begin < 2 else runs.clone(), *sizes)
    known = host.offsets[:, :, end] - host.offsets[:, :, first]
    total = int(known.sum())
    begins = edges[:, :, :1].to(torch.int64)
    counts = (edges[:, :, -1:] - begins).view(-1)
    before = counts.cumsum(0) - counts
    grid = torch.arange(batch * heads, device=views.device)
    grid = grid.repeat_interleave(counts, output_size=total)
    place = torch.arange(total, device=views.device) + (begins.view(-1) - before)[grid]
    offsets = edges - begins + before.view(batch, heads, 1)
    return MaskViews(offsets.to(torch.int32), padded(views.runs[place]), *sizes)
