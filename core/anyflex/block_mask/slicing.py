"""Choosing batch entries, heads and rows of q blocks of a block mask."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anyflex.block_mask.runs import RunList, pack
from anyflex.errors import BlockMaskError
from anyflex.mod_graph.graph import parse_graph

if TYPE_CHECKING:
    from anyflex.block_mask.block_mask import BlockMask

__all__ = ["select"]

_AXES = ("batch", "head", "q block")
_INPUTS = ("b", "h", "q_idx")


def select(mask: BlockMask, index: Any) -> tuple[Tensor, Tensor, int, bool]:
    """Return (offsets, runs, q length, shifted) of a slice.

    `shifted`: an index that the mask mod reads changes its meaning.
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
    chosen = [
        _positions(i, size, axis) for i, size, axis in zip(padded, sizes, _AXES, strict=True)
    ]
    reads = (
        parse_graph(mask.traced.text).inputs() if mask.traced is not None else frozenset(_INPUTS)
    )
    shifted = any(
        name in reads and not torch.equal(positions, torch.arange(positions.numel()))
        for positions, name in zip(chosen, _INPUTS, strict=True)
    )
    counts = (host.offsets[..., 1:] - host.offsets[..., :-1]).to(torch.int64)
    begins = host.offsets[..., :-1].to(torch.int64)
    b, h, r = chosen
    place = (b[:, None, None], h[:, None], r)
    counts, begins = counts[place].reshape(-1), begins[place].reshape(-1)
    row = torch.arange(counts.numel()).repeat_interleave(counts)
    inside = torch.arange(row.numel()) - (counts.cumsum(0) - counts)[row]
    runs = host.runs[begins[row] + inside].to(torch.int64)
    offsets, packed = pack(
        RunList(row, *runs.unbind(1)), b.numel(), h.numel(), r.numel(), host.kv_blocks
    )
    length = _packed_length(padded[2], r, mask.seq_lengths[0], mask.BLOCK_SIZE[0])
    return offsets.to(views.device), packed.to(views.device), length, shifted


def _packed_length(index: Any, rows: Tensor, q_length: int, block: int) -> int:
    """Length of the chosen rows: exact if the ragged last row is chosen last or not at all. For a
    tensor index, whose values torch doesn't read, it is always whole blocks."""
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
        return torch.tensor(range(begin, end, step), dtype=torch.int64)
    if isinstance(index, list):
        index = torch.tensor(index)
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
    return torch.tensor([position % size])


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
    same = f"; the mask is the same for every {axis}: don't index it" if size == 1 else ""
    raise BlockMaskError(f"{axis} index {index} is out of range for size {size}{same}")
