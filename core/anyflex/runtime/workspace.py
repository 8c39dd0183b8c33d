"""Workspaces: memory that a kernel computes in, for the time of one launch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from anyflex.contract.call import TensorSpec

__all__ = ["KEPT_BYTES", "Workspace", "allocate", "give_back", "take"]

KEPT_BYTES = 256 << 20
"""Maximum CPU memory in bytes that a process keeps from one launch to the next."""

_SMALL_BYTES = 1 << 20
"""Minimum size in bytes of kept memory. The C library keeps smaller pieces when they are freed, so
allocating them again costs no more than finding room in other memory. Launches with equal requests
still share small tensors: making a tensor takes a tenth of a small attention's time."""
_ALIGNMENT = 64


class Workspace(NamedTuple):
    """Workspace of one launch.

    Args:
        specs: what the kernel asked for.
        tensors: one for each.
        memory: the bytes that hold all tensors, which any launch may use after this one, or None.
        again: a launch that asks for the same may use the tensors after this one.
    """

    specs: tuple[TensorSpec, ...]
    tensors: tuple[Tensor, ...]
    memory: Tensor | None = None
    again: bool = False


_NONE = Workspace((), ())

# At most one entry in each. A list's methods, and assignment to all of it, are atomic.
_kept: list[Workspace] = []
_kept_small: list[Workspace] = []


def allocate(device: torch.device, specs: tuple[TensorSpec, ...]) -> tuple[Tensor, ...]:
    """Return new tensors, zeroed where their specs say so."""
    return tuple(
        [
            (torch.zeros if spec.zeroed else torch.empty)(
                spec.shape, dtype=spec.dtype, device=device
            )
            for spec in specs
        ]
    )


def take(device: torch.device, specs: tuple[TensorSpec, ...]) -> Workspace:
    """Return a workspace for one launch.

    Accelerators have torch's caching allocators. On a CPU torch gets large memory from the
    operating system at each allocation, page by page as it is touched: on 16 cores that took
    longer than the attention of a sliding window. There the last launch's memory is used again,
    and so are the tensors of the last small workspace, by launches that ask for the same.
    """
    if not specs:
        return _NONE
    if device.type != "cpu":
        return Workspace(specs, allocate(device, specs))
    for kept in (_kept_small, _kept):
        try:
            found = kept.pop()
        except IndexError:  # in use by another thread, or none was needed yet
            continue
        if found.specs == specs:
            return found
        kept[:] = (found,)
        del found  # it would keep its memory
    places = []
    end = 0
    zeroed = False
    for spec in specs:
        begin = end + -end % _ALIGNMENT
        end = begin + math.prod(spec.shape) * spec.dtype.itemsize
        places.append(slice(begin, end))
        zeroed = zeroed or spec.zeroed
    if zeroed or end > KEPT_BYTES:
        return Workspace(specs, allocate(device, specs))
    if end < _SMALL_BYTES:
        return Workspace(specs, _allocate_writable(device, specs), again=True)
    try:
        memory = _kept.pop().memory
    except IndexError:
        memory = None
    if memory is None or memory.numel() < end:
        # Both at a time would exceed the promised size.
        del memory
        (memory,) = _allocate_writable(device, (TensorSpec((end,), torch.uint8),))
    # Tensors made in inference mode can't be written outside of it.
    with torch.inference_mode(False):
        tensors = tuple(
            memory[place].view(spec.dtype).view(spec.shape)
            for spec, place in zip(specs, places, strict=True)
        )
    return Workspace(specs, tensors, memory)


def _allocate_writable(device: torch.device, specs: tuple[TensorSpec, ...]) -> tuple[Tensor, ...]:
    """As `allocate`: tensors that may also be written outside of inference mode."""
    if not torch.is_inference_mode_enabled():
        return allocate(device, specs)
    with torch.inference_mode(False):
        return allocate(device, specs)


def give_back(workspace: Workspace) -> None:
    """End a launch: nothing reads its workspace any more."""
    if workspace.again:
        _kept_small[:] = (workspace,)
    elif workspace.memory is not None and not _kept:
        _kept.append(workspace)
