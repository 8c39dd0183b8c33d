"""torch's index lists as runs, checked entry by entry. They are read on the host, once."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.errors import BlockMaskError
from anyflex.mask_structure.device_views import MaskViews, packed_views
from anyflex.mask_structure.run_checks import (
    checked_block_size,
    checked_lengths,
    first_of,
    refuse_meta,
    row_at,
)
from anyflex.mask_structure.runs import FULL, PARTIAL, RunList, block_count, joined

__all__ = ["runs_while_compiling", "views_of_lists"]


def views_of_lists(
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    block_size: int | tuple[int, int],
    seq_lengths: tuple[int, int] | None,
) -> MaskViews:
    """Return the structure that lists say, on their device.

    Arguments as for `BlockMask.from_kv_blocks`. Raises BlockMaskError.
    """
    sizes = checked_block_size(block_size)
    if (full_kv_num_blocks is None) != (full_kv_indices is None):
        missing = "indices" if full_kv_indices is None else "num_blocks"
        raise BlockMaskError(
            f"full_kv_{missing} is missing: full_kv_num_blocks and full_kv_indices come together"
        )
    if seq_lengths is None:
        if not isinstance(kv_indices, Tensor) or kv_indices.dim() < 2:
            raise BlockMaskError("kv_indices must be a Tensor [B', H', Qb, width]")
        seq_lengths = (kv_indices.shape[-2] * sizes[0], kv_indices.shape[-1] * sizes[1])
    lengths = checked_lengths(seq_lengths)
    rows, columns = (block_count(*pair) for pair in zip(lengths, sizes, strict=True))
    lists = [("kv", kv_num_blocks, kv_indices, PARTIAL)]
    if full_kv_num_blocks is not None and full_kv_indices is not None:
        lists.append(("full_kv", full_kv_num_blocks, full_kv_indices, FULL))
    listed, (batch, heads, listed_rows) = _listed_runs(lists, columns)
    if listed_rows != rows:
        raise BlockMaskError(
            f"kv_num_blocks has {listed_rows} rows of blocks, and Q_LEN {lengths[0]} has {rows} "
            f"of {sizes[0]}; a slice needs its own seq_lengths"
        )
    return packed_views(listed, (batch, heads), lengths, sizes).on(kv_indices.device)


def runs_while_compiling(
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    columns: int,
) -> tuple[Tensor, Tensor]:
    """Return (offsets, runs) of index lists by operations whose shapes don't depend on data.

    For torch.compile: nothing is checked, nothing is read on the host, and `runs` has room for a
    run a block. An index past the last column is dropped.
    """
    grid = _kind_grid(kv_num_blocks, kv_indices, columns, PARTIAL)
    if full_kv_num_blocks is not None and full_kv_indices is not None:
        grid = torch.maximum(grid, _kind_grid(full_kv_num_blocks, full_kv_indices, columns, FULL))
    batch, heads, rows, _ = grid.shape
    edge = torch.nn.functional.pad(grid, (1, 1))
    changes = edge[..., 1:] != edge[..., :-1]
    starts = changes[..., :-1] & (grid != 0)
    place = torch.arange(columns + 1, device=grid.device)
    # The column of the next change, looking back from the right edge. Every row whose last block
    # is visited ends with one.
    following = torch.where(changes, place, columns)[..., 1:].flip(-1).cummin(-1).values.flip(-1)
    fields = torch.stack([place[:-1].expand_as(grid), following, grid], -1).view(-1, 3)
    flat = starts.view(-1)
    position = torch.where(flat, flat.cumsum(0) - 1, flat.numel())
    runs = torch.zeros(flat.numel() + 2, 3, dtype=torch.int32, device=grid.device)
    runs = runs.index_copy(0, position, fields.to(torch.int32))
    counts = starts.sum(-1).view(-1).cumsum(0)
    before = torch.nn.functional.pad(counts, (1, 0))
    offsets = torch.cat(
        [before[:-1].view(batch, heads, rows), counts.view(batch, heads, rows)[..., -1:]], -1
    )
    return offsets.to(torch.int32), runs


def _kind_grid(counts: Tensor, indices: Tensor, columns: int, kind: int) -> Tensor:
    """int64 [B', H', Qb, columns]: `kind` in the listed blocks, 0 elsewhere."""
    counts, indices = _four_dimensional(counts, 3), _four_dimensional(indices, 4)
    used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    block = torch.where(used, indices, columns).clamp(0, columns).to(torch.int64)
    grid = torch.zeros(*indices.shape[:3], columns + 1, dtype=torch.int64, device=indices.device)
    return grid.scatter(-1, block, kind)[..., :columns]


def _listed_runs(
    lists: list[tuple[str, Tensor, Tensor, int]], columns: int
) -> tuple[RunList, tuple[int, int, int]]:
    """Return the runs of torch's index lists, in any order, and (B', H', Qb).

    Args:
        lists: for each pair its name ("kv" or "full_kv"), ``num_blocks`` int32 [B', H', Qb],
            ``indices`` int32 [B', H', Qb, width], and the kind of its blocks. At least one.
        columns: columns of blocks there are.
    """
    parts = []
    for name, counts, indices, kind in lists:
        counts, indices = _checked_list(name, counts, indices)
        width = indices.shape[-1]
        place = (torch.arange(width, device="cpu") < counts[..., None]).flatten(0, 2).nonzero()
        row, slot = place.unbind(1)
        block = indices.flatten(0, 2)[row, slot]
        if (i := first_of((block < 0) | (block >= columns))) is not None:
            at = row_at(int(row[i]), counts.shape)
            raise BlockMaskError(
                f"{name}_indices names block {int(block[i])} in {at}; there are {columns} columns "
                "of blocks"
            )
        parts.append(RunList(row, block, block + 1, torch.full_like(row, kind)))
    shapes = {tuple(counts.shape) for _, counts, _, _ in lists}
    if len(shapes) > 1:
        raise BlockMaskError(
            f"kv_num_blocks and full_kv_num_blocks differ in shape: {sorted(shapes)}"
        )
    runs = joined(parts)
    key, order = torch.sort(runs.row * max(columns, 1) + runs.first)
    counts = _four_dimensional(lists[0][1], 3)
    if (twice := first_of(key[1:] == key[:-1])) is not None:
        i, j = order[twice : twice + 2].tolist()
        both = int(runs.kind[i]) != int(runs.kind[j])
        problem = "both full and partial" if both else "listed twice (a duplicate)"
        raise BlockMaskError(
            f"block {int(runs.first[i])} in {row_at(int(runs.row[i]), counts.shape)} is {problem}"
        )
    return runs, (counts.shape[0], counts.shape[1], counts.shape[2])


def _checked_list(name: str, counts: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    for label, tensor in ((f"{name}_num_blocks", counts), (f"{name}_indices", indices)):
        if not isinstance(tensor, Tensor):
            raise BlockMaskError(f"{label} must be a Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in (torch.int32, torch.int64):
            raise BlockMaskError(f"{label} must have dtype int32, got {tensor.dtype}")
        refuse_meta(label, tensor)
    if not 2 <= indices.dim() <= 4 or counts.shape != indices.shape[:-1]:
        raise BlockMaskError(
            f"{name}_indices must have shape [B', H', Qb, width] (B' and H' may be left out) and "
            f"{name}_num_blocks its first dimensions; got {list(indices.shape)} and "
            f"{list(counts.shape)}"
        )
    counts = _four_dimensional(counts, 3).cpu().to(torch.int64)
    indices = _four_dimensional(indices, 4).cpu().to(torch.int64)
    width = indices.shape[-1]
    if (i := first_of(((counts < 0) | (counts > width)).reshape(-1))) is not None:
        raise BlockMaskError(
            f"{name}_num_blocks is {int(counts.reshape(-1)[i])} in {row_at(i, counts.shape)}; "
            f"{name}_indices holds 0 to {width} (its width) a row"
        )
    return counts, indices


def _four_dimensional(tensor: Tensor, rank: int) -> Tensor:
    while tensor.dim() < rank:
        tensor = tensor[None]
    return tensor
