"""Checks of the sizes, devices, offsets and runs that a user builds or draws a block mask from.

All raise BlockMaskError and name argument, row, run or position.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anyflex.errors import BlockMaskError
from anyflex.mask_structure.runs import FULL, PARTIAL, block_count
from anyflex.tensors.dynamo_errors import fail
from anyflex.tensors.stand_in import stands_in_for
from anyflex.tensors.storage_checks import PLAIN
from anyflex.tensors.symbolic_numbers import fixed
from anyflex.tensors.torch_versions import dispatch_modes, is_wrapped

__all__ = [
    "check_form",
    "check_structure",
    "check_types",
    "check_values",
    "checked_block_size",
    "checked_device",
    "checked_grid_size",
    "checked_length",
    "checked_lengths",
    "first_of",
    "holds_numbers",
    "refuse_meta",
    "row_at",
    "row_name",
]

_LARGEST = 2**31 - 1


def checked_length(name: str, value: Any) -> int:
    """Return a length, batch or head count as an int >= 0."""
    number = _integer(value)
    if number is None:
        raise BlockMaskError(
            f"{name} must be an int, got {value!r} of type {type(value).__name__}"
        )
    if not 0 <= number <= _LARGEST:
        raise BlockMaskError(f"{name} must be in 0..{_LARGEST}, got {number}")
    return number


def checked_lengths(value: Any) -> tuple[int, int]:
    """Return (q, kv) lengths."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise BlockMaskError(f"seq_lengths must be a pair (Q_LEN, KV_LEN), got {value!r}")
    return checked_length("Q_LEN", value[0]), checked_length("KV_LEN", value[1])


def checked_block_size(value: Any) -> tuple[int, int]:
    """Return (q, kv) block sizes from an int or a pair."""
    sizes = _pair(value)
    if sizes is None:
        raise BlockMaskError(
            f"BLOCK_SIZE must be an int or a pair of ints (q, kv), got {value!r} of type "
            f"{type(value).__name__}"
        )
    if not all(1 <= size <= _LARGEST for size in sizes):
        raise BlockMaskError(f"BLOCK_SIZE must be in 1..{_LARGEST}, got {value!r}")
    return sizes


def checked_grid_size(value: Any) -> tuple[int, int]:
    """Return a drawing's most (rows, columns) from an int or a pair; -1 is no bound."""
    sizes = _pair(value)
    if sizes is None or not all(size > 0 or size == -1 for size in sizes):
        raise BlockMaskError(
            "grid_size must be an int or a pair of ints (rows, columns), each at least 1 or -1 "
            f"for one character a block, got {value!r}"
        )
    return sizes


def checked_device(value: Any) -> torch.device:
    """Return the device that `value` names."""
    if stands_in_for(str(value).partition(":")[0]):
        return torch.device("cpu")
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise BlockMaskError(f"device {value!r} is not a device that torch knows") from error
    try:
        # A device without index stands for the current one, and kernels compare the index.
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BlockMaskError(f"device {str(device)!r} can't be used here: {error}") from error


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        # RuntimeError: a symbolic or meta value. None is reported as a wrong type.
        return None


def _pair(value: Any) -> tuple[int, int] | None:
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    sizes = [number for number in map(_integer, pair) if number is not None]
    return (sizes[0], sizes[1]) if len(pair) == len(sizes) == 2 else None


def check_types(offsets: Any, runs: Any, of: str = "") -> None:
    """Check that both are int32 tensors of their ranks; Dynamo follows it.

    Args:
        of: what follows their names in messages: ``" of block_mask"``.
    """
    for name, tensor in (("offsets", offsets), ("runs", runs)):
        if not isinstance(tensor, Tensor):
            fail("BlockMaskError", f"{name}{of} must be a Tensor, got {type(tensor).__name__}")
        if tensor.is_nested or tensor.layout is not torch.strided:
            fail("BlockMaskError", f"{name}{of} must be dense (layout torch.strided)")
        if tensor.dtype is not torch.int32:
            fail("BlockMaskError", f"{name}{of} must have dtype int32, got {tensor.dtype}")
    if runs.dim() != 2 or runs.shape[1] != 3:
        fail(
            "BlockMaskError",
            f"runs{of} must have shape [n, 3] (first block, end block, kind), got "
            f"{[fixed(size) for size in runs.shape]}",
        )
    if offsets.dim() != 3:
        fail(
            "BlockMaskError",
            f"offsets{of} must have shape [B', H', Qb + 1] (Qb blocks of queries), got "
            f"{[fixed(size) for size in offsets.shape]}",
        )


def check_form(
    offsets: Tensor, runs: Tensor, lengths: tuple[int, int], block_size: tuple[int, int]
) -> None:
    """Check dtypes, shapes and devices, no values. `runs` may be longer than used."""
    check_types(offsets, runs)
    if runs.shape[0] > _LARGEST:
        raise BlockMaskError(
            f"runs has {runs.shape[0]} rows; offsets are int32, so at most {_LARGEST} fit"
        )
    if runs.device != offsets.device:
        raise BlockMaskError(f"offsets is on {offsets.device} and runs on {runs.device}")
    rows = block_count(lengths[0], block_size[0])
    if offsets.shape[2] != rows + 1:
        raise BlockMaskError(
            f"offsets must have shape [B', H', {rows + 1}] (q length {lengths[0]} has {rows} "
            f"blocks of {block_size[0]}, plus one), got {list(offsets.shape)}"
        )


def check_values(
    offsets: Tensor, runs: Tensor, lengths: tuple[int, int], block_size: tuple[int, int]
) -> None:
    """Check the numbers of offsets and runs of the right form, all of which are used, on the
    CPU."""
    _check_offsets(offsets, runs.shape[0])
    _check_kinds_and_ends(offsets, runs, block_count(lengths[1], block_size[1]))


def check_structure(
    offsets: Any,
    runs: Any,
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    *,
    values: bool = True,
) -> None:
    """Check a mask's tensors that come without their mask: a map over a pytree, or the caller of a
    compiled program, may pass anything.

    Args:
        values: look at the numbers too, on the CPU alone: another device would be waited for, and
            fake tensors have none.
    """
    try:
        check_form(offsets, runs, lengths, block_size)
        if not values or dispatch_modes() or offsets.device.type != "cpu":
            return
        if holds_numbers(offsets) and holds_numbers(runs):
            used = max(0, int(offsets[-1, -1, -1])) if offsets.numel() else 0
            check_values(offsets, runs[:used], lengths, block_size)
    except BlockMaskError as error:
        raise BlockMaskError(
            f"block_mask holds other tensors than it was built with: {error}. What a map over a "
            "mask's tensors (tree_map) puts in their place, or a caller of a compiled program, "
            "may be copies of them, nothing else."
        ) from None


def holds_numbers(tensor: Tensor) -> bool:
    """Whether a tensor has numbers at an address of its own: fake tensors, other subclasses and
    functorch's wrappers don't."""
    return type(tensor) in PLAIN and not tensor.is_meta and not is_wrapped(tensor)


def refuse_meta(name: str, tensor: Tensor) -> None:
    """Raise BlockMaskError for a tensor that is to be read as part of a mask and holds no
    numbers."""
    if tensor.device.type == "meta":
        raise BlockMaskError(
            f"{name} is on meta, where it has no values, and which blocks are live can't be read: "
            "build the mask on a device that holds numbers"
        )


def _check_offsets(offsets: Tensor, count: int) -> None:
    if not offsets.numel():
        return
    batch, heads, edges = offsets.shape
    grids = offsets.reshape(batch * heads, edges).to(torch.int64)
    # Lower bound of each entry: the one before, across rows and heads alike.
    before = torch.cat([grids.new_zeros(1), grids.reshape(-1)[:-1]]).view_as(grids)
    wrong = grids < before
    # A grid begins where the one before it ended.
    wrong[:, 0] |= grids[:, 0] != before[:, 0]
    if wrong.any():
        grid, edge = (int(i) for i in wrong.nonzero()[0])
        raise BlockMaskError(
            f"offsets decrease or leave a gap at position [{grid // heads}, {grid % heads}, "
            f"{edge}]: the value is {int(grids[grid, edge])}, after {int(before[grid, edge])}"
        )
    last = int(grids[-1, -1])
    if last != count:
        raise BlockMaskError(
            f"offsets must end with the number of runs: the last value, at position [{batch - 1}, "
            f"{heads - 1}, {edges - 1}], is {last}, and runs has {count} rows"
        )


def _check_kinds_and_ends(offsets: Tensor, runs: Tensor, columns: int) -> None:
    first, end, kind = runs.to(torch.int64).unbind(1)
    if (i := first_of(end <= first)) is not None:
        raise BlockMaskError(f"run {i} ends at block {int(end[i])} and begins at {int(first[i])}")
    if (i := first_of((first < 0) | (end > columns))) is not None:
        raise BlockMaskError(
            f"run {i} in {row_name(offsets, i)} covers blocks {int(first[i])}:{int(end[i])}; "
            f"there are {columns} columns of blocks"
        )
    if (i := first_of((kind != FULL) & (kind != PARTIAL))) is not None:
        raise BlockMaskError(f"run {i} has kind {int(kind[i])}; FULL is {FULL}, PARTIAL {PARTIAL}")
    starts = torch.zeros(runs.shape[0] + 1, dtype=torch.bool, device="cpu")
    starts[offsets.reshape(-1).to(torch.int64)] = True
    if (i := first_of((first[1:] < end[:-1]) & ~starts[1 : first.numel()])) is not None:
        raise BlockMaskError(
            f"runs {i} and {i + 1} in {row_name(offsets, i)} overlap or are not in order: "
            f"{int(first[i])}:{int(end[i])}, then {int(first[i + 1])}:{int(end[i + 1])}"
        )


def first_of(wrong: Tensor) -> int | None:
    """Return the first position where a bool vector is True, None if it is nowhere."""
    found = wrong.nonzero()
    return int(found[0]) if found.numel() else None


def row_name(offsets: Tensor, run: int) -> str:
    """Return the name of the row that a run belongs to, for messages."""
    batch, heads, edges = offsets.shape
    ended = int((offsets[..., 1:] <= run).sum())
    return row_at(ended, (batch, heads, edges - 1))


def row_at(position: int, shape: Sequence[int]) -> str:
    """Return the name of a row of blocks, counted through [B', H', Qb]."""
    _, heads, rows = shape
    return f"row [{position // rows // heads}, {position // rows % heads}, {position % rows}]"
