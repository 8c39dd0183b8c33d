"""Slices of a block mask: chosen batch entries, heads and rows of q blocks."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from anyflex.block_mask.mask_state import MaskContent
from anyflex.block_mask.offset_mask_mod import indices_read
from anyflex.errors import BlockMaskError
from anyflex.mask_structure.device_views import MaskViews, packed_views
from anyflex.mask_structure.runs import gathered

__all__ = ["select"]

_AXES = ("batch", "head", "q block")


def select(mask: MaskContent, index: Any) -> tuple[MaskViews, dict[str, int | Tensor]]:
    """Return the structure of a slice, and its shifts.

    `shifts`: maps the mask mod's indices b, h and q_idx to those of the whole mask, where it reads
    them and they changed; see `anyflex.block_mask.offset_mask_mod`.
    """
    indices = index if isinstance(index, tuple) else (index,)
    if len(indices) > 3:
        raise BlockMaskError(
            f"a block mask takes up to 3 indices (batch, head, q block), got {len(indices)}"
        )
    if sum(isinstance(i, (Tensor, list)) for i in indices) > 1:
        raise BlockMaskError("a block mask takes at most one tensor index; index twice")
    views = mask.views()
    host = views.on(torch.device("cpu"))
    sizes = (host.offsets.shape[0], host.offsets.shape[1], host.q_blocks)
    padded = (*indices, slice(None), slice(None), slice(None))[:3]
    b, h, r = (
        _positions(i, size, axis) for i, size, axis in zip(padded, sizes, _AXES, strict=True)
    )
    length = _packed_length(padded[2], r, mask.seq_lengths[0], mask.BLOCK_SIZE[0])
    place = (b[:, None, None], h[:, None], r)
    edges = host.offsets.to(torch.int64)
    runs = gathered(
        edges[..., :-1][place].reshape(-1), edges[..., 1:][place].reshape(-1), host.runs
    )
    chosen = packed_views(runs, (b.numel(), h.numel()), (length, host.kv_length), host.block_size)
    reads = indices_read(mask.traced, mask.opaque)
    rows = _row_shift(r, length, mask.seq_lengths[0], mask.BLOCK_SIZE[0])
    found = {"b": _shift(b), "h": _shift(h), "q_idx": rows}
    shifts = {
        name: shift.to(views.device) if isinstance(shift, Tensor) else shift
        for name, shift in found.items()
        if name in reads and (isinstance(shift, Tensor) or shift)
    }
    return chosen.on(views.device), shifts


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
    if isinstance(index, slice):
        begin, end, step = index.indices(size)
        if step > 0 and begin >= size > 0:
            _raise_out_of_range(axis, index.start, size)
        return torch.tensor(range(begin, end, step), dtype=torch.int64, device="cpu")
    if isinstance(index, list):
        try:
            index = torch.tensor(index, device="cpu")
        except (TypeError, ValueError) as error:
            raise BlockMaskError(
                f"{axis} index must be a list of ints, got {index!r}: {error}"
            ) from None
    if isinstance(index, Tensor) and index.dim() > 0:
        return _tensor_positions(index.cpu(), size, axis)
    if isinstance(index, bool):
        raise BlockMaskError(f"{axis} index must be an int, slice or vector, got {index!r}")
    try:
        position = operator.index(index)
    except TypeError as error:
        raise BlockMaskError(
            f"{axis} index must be an int, slice or vector, got {index!r}"
        ) from error
    if not -size <= position < size:
        _raise_out_of_range(axis, position, size)
    return torch.tensor([position % size], device="cpu")


def _tensor_positions(index: Tensor, size: int, axis: str) -> Tensor:
    if index.dim() != 1 or index.dtype.is_floating_point or index.dtype.is_complex:
        raise BlockMaskError(
            f"{axis} index must be a vector of ints or bools, got shape {list(index.shape)} and "
            f"dtype {index.dtype}"
        )
    if index.dtype is torch.bool:
        if index.numel() != size:
            raise BlockMaskError(f"{axis} index has {index.numel()} bools, and the size is {size}")
        return index.nonzero().squeeze(1)
    index = index.to(torch.int64)
    wrong = ((index < -size) | (index >= size)).nonzero()
    if wrong.numel():
        _raise_out_of_range(axis, int(index[int(wrong[0])]), size)
    return torch.where(index < 0, index + size, index)


def _raise_out_of_range(axis: str, index: int, size: int) -> None:
    same = ""
    if size == 1 and axis != _AXES[2]:
        same = f"; the mask is the same for every {axis}: don't index it"
    raise BlockMaskError(f"{axis} index {index} is out of range for size {size}{same}")
