"""Workspaces: memory that a kernel computes in, for the time of one launch."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from anyflex.contract.call import TensorSpec

__all__ = ["KEPT_BYTES", "Workspace", "allocate", "give_back", "take"]

KEPT_BYTES = 256 << 20
"""A process keeps at most so much memory of the CPU from one launch to the next."""

_LEAST_BYTES = 1 << 20
"""What is smaller the C library keeps when it is freed."""
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Workspace:
    """What a launch has taken.

    Args:
        specs: what the kernel asked for.
        tensors: one for each.
        memory: the bytes that all lie in, which may be given back, or None.
    """

    specs: tuple[TensorSpec, ...]
    tensors: tuple[Tensor, ...]
    memory: Tensor | None


_NONE = Workspace((), (), None)

# One at most. A list's append and pop are atomic.
_kept: list[Workspace] = []


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
    longer than the attention of a sliding window. There the last launch's memory is used again.
    """
    if not specs:
        return _NONE
    if device.type != "cpu":
        return Workspace(specs, allocate(device, specs), None)
    kept = None
    if _kept:
        with suppress(IndexError):  # another thread was faster
            kept = _kept.pop()
    if kept is not None and kept.specs == specs:
        return kept
    places = []
    end = 0
    for spec in specs:
        begin = end + -end % _ALIGNMENT
        end = begin + math.prod(spec.shape) * spec.dtype.itemsize
        places.append(slice(begin, end))
    if not _LEAST_BYTES <= end <= KEPT_BYTES or any(spec.zeroed for spec in specs):
        if kept is not None:
            give_back(kept)
        return Workspace(specs, allocate(device, specs), None)
    memory = None if kept is None else kept.memory
    # What inference mode makes can't be written outside of it.
    with torch.inference_mode(False):
        if memory is None or memory.numel() < end:
            # Both at a time would be more than is promised.
            del kept, memory
            memory = torch.empty(end, dtype=torch.uint8, device=device)
        tensors = tuple(
            memory[place].view(spec.dtype).view(spec.shape)
            for spec, place in zip(specs, places, strict=True)
        )
    return Workspace(specs, tensors, memory)


def give_back(workspace: Workspace) -> None:
    """End a launch: nothing reads its workspace any more."""
    if workspace.memory is not None and not _kept:
        _kept.append(workspace)
