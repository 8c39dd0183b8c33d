"""Slices of a block mask: chosen batch entries, heads and rows of q blocks."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from anyflex.block_mask.mask_state import MaskContent
from anyflex.block_mask.offset_mask_mod import indices_read
from anyflex.errors import BlockMaskError
from anyflex.mask_structure.device_views import MaskViews, packed_views
from anyflex.mask_structure.runs import gathered

__all__ = ["select"]

_AXES = ("batch", "head", "q block")


def select(
    mask: MaskContent, index: Any
) -> tuple[MaskViews, dict[str, int | Tensor], tuple[int, int]]:
    """Return the structure of a slice, its shifts, and its B and H.

    `shifts`: maps the mask mod's indices b, h and q_idx to those of the whole mask, where it reads
    them and they changed; see `anyflex.block_mask.offset_mask_mod`.
    """
    indices = index if isinstance(index, tuple) else (index,)
    if len(indices) > 4:
        raise BlockMaskError(
            "a block mask takes up to 4 indices (batch, head, q block, and all kv blocks), got "
            f"{len(indices)}"
        )
    if sum(isinstance(i, (Tensor, list)) for i in indices) > 1:
        raise BlockMaskError("a block mask takes at most one tensor index; index twice")
    views = mask.views()
    host = views.on(torch.device("cpu"))
    for keys in indices[3:]:
        if not isinstance(keys, slice) or keys.indices(host.kv_blocks) != (0, host.kv_blocks, 1):
            raise BlockMaskError(
                f"kv block index must keep all {host.kv_blocks} blocks, as ':' does, got "
                f"{keys!r}; row_slice(..., kv_len=) keeps the first keys"
            )
    sizes = (*mask.shape[:2], host.q_blocks)
    padded = (*indices, slice(None), slice(None), slice(None))[:3]
    b, h, r = (
        _positions(i, size, axis) for i, size, axis in zip(padded, sizes, _AXES, strict=True)
    )
    length = _packed_length(padded[2], r, mask.seq_lengths[0], mask.BLOCK_SIZE[0])
    # Entries that are stored once for all stay so.
    stored_b, stored_h = (
        torch.zeros(1, dtype=torch.int64, device="cpu") if stored == 1 < size else chosen
        for chosen, stored, size in zip((b, h), host.shape, sizes, strict=False)
    )
    place = (stored_b[:, None, None], stored_h[:, None], r)
    edges = host.offsets.to(torch.int64)
    runs = gathered(
        edges[..., :-1][place].reshape(-1), edges[..., 1:][place].reshape(-1), host.runs
    )
    grids = (stored_b.numel(), stored_h.numel())
    chosen = packed_views(runs, grids, (length, host.kv_length), host.block_size)
    reads = indices_read(mask.traced, mask.opaque)
    rows = _row_shift(r, length, mask.seq_lengths[0], mask.BLOCK_SIZE[0])
    found = {"b": _shift(b), "h": _shift(h), "q_idx": rows}
    shifts = {
        name: shift.to(views.device) if isinstance(shift, Tensor) else shift
        for name, shift in found.items()
        if name in reads and (isinstance(shift, Tensor) or shift)
    }
    return chosen.on(views.device), shifts, (b.numel(), h.numel())


def _shift(positions: Tensor) -> int | Tensor:
    """Number that turns 0, 1, ... into these positions when added, or the positions themselves."""
    if not positions.numel():
        return 0
    first = int(positions[0])
    consecutive = torch.equal(
        positions, torch.arange(first, first + positions.numel(), device="cpu")
    )
    return first if consecutive else positions


def _row_shift(rows: Tensor, length: int, q_length: int, block: int) -> int | Tensor:
    """The same for rows of elements, given the rows of blocks and the length of the slice."""
    shift = _shift(rows)
    if isinstance(shift, int) and shift * block + length <= q_length:
        return shift * block
    # Where a ragged row is used as a whole one, its last row of elements stands for the missing
    # ones.
    elements = rows[:, None] * block + torch.arange(block, device="cpu")
    return elements.reshape(-1)[:length].clamp(max=max(q_length - 1, 0))


def _packed_length(index: Any, rows: Tensor, q_length: int, block: int) -> int:
    """Length of the chosen rows: exact if the ragged last row is chosen last or not at all. A
    tensor index, whose values torch doesn't read, always gives whole blocks."""
    whole = rows.numel() * block
    last = -(-q_length // block) - 1
    if isinstance(index, (Tensor, list)) or not rows.numel() or int(rows[-1]) != last:
        return whole
    return whole - ((last + 1) * block - q_length)


def _positions(index: Any, size: int, axis: str) -> Tensor:
    """Return the chosen positions, int64 and counted from 0."""
    if isinstance(index, slice):
        begin, end, step = index.indices(size)
        if step > 0 and begin >= size > 0:
            _raise_out_of_range(axis, index.start, size)
        return torch.tensor(range(begin, end, step), dtype=torch.int64, device="cpu")
    wrong = BlockMaskError(
        f"{axis} index must be an int, a slice, or a vector of ints or bools, got {index!r}"
    )
    try:
        positions = torch.as_tensor(index, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise wrong from error
    if positions.dtype is torch.bool and positions.dim() == 1:
        if positions.numel() != size:
            raise BlockMaskError(
                f"{axis} index has {positions.numel()} bools, and the size is {size}"
            )
        return positions.nonzero().squeeze(1)
    if (
        positions.dim() > 1
        or positions.dtype.is_floating_point
        or positions.is_complex()
        or positions.dtype is torch.bool
    ):
        raise wrong
    positions = positions.to(torch.int64).reshape(-1)
    outside = positions[(positions < -size) | (positions >= size)]
    if outside.numel():
        _raise_out_of_range(axis, int(outside[0]), size)
    return torch.where(positions < 0, positions + size, positions)


def _raise_out_of_range(axis: str, index: int, size: int) -> NoReturn:
    same = ""
    if size == 1 and axis != _AXES[2]:
        same = f"; the mask is the same for every {axis}: don't index it"
    raise BlockMaskError(f"{axis} index {index} is out of range for size {size}{same}")
