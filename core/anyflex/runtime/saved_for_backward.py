"""Saved outputs of a kernel behind the static op: what forward leaves for backward, in one tensor
of bytes.

The op's outputs must have their sizes before there is a spec, so the backend says while a program
is traced how many bytes a query row takes at most (`Backend.saved_bytes`). The kernel is chosen at
each launch, so a number in the tensor says which kernel's bytes they are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from anyflex.contract.call import TensorSpec

from anyflex.tensors.torch_versions import dynamo_constant

__all__ = ["NOTHING", "SavedBytes", "cut", "saved_bytes", "size"]

SavedBytes = tuple[int, int]
"""(a, b): a * Ev + b bytes for each query row of each head."""

NOTHING: SavedBytes = (0, 0)

_ALIGNMENT = 16


# Compiled programs keep the result: a stale guess is harmless.
@dynamo_constant
def saved_bytes(device: torch.device, dtype: torch.dtype, backend: str | None) -> SavedBytes:
    """Ask the backend that takes a plain call how many bytes its kernels leave for backward.

    If another backend computes the call in the end, results are still right: bytes that don't fit
    aren't kept, and backward runs forward again.

    Args:
        device, dtype: of query.
        backend: the ``backend=`` argument, or None.
    """
    from anyflex.errors import AnyflexError, PluginError
    from anyflex.registry.plugin_errors import report
    from anyflex.runtime.plain_backend import plain_backend

    taker = plain_backend(device, dtype, backend, True)
    if taker is None or taker[2].backward != "own":
        return NOTHING
    entry, chosen, _ = taker
    try:
        return entry.saved_bytes(chosen, dtype)
    except PluginError as error:
        report(error, "compiled programs run forward again in backward")
        return NOTHING
    except (AnyflexError, torch.OutOfMemoryError):
        return NOTHING


def size(query: Tensor, value: Tensor, saved: SavedBytes) -> Any:
    """Return how many bytes the op's tensor has; sizes may be symbols."""
    batch, heads, length = query.shape[:3]
    return batch * heads * length * (saved[0] * value.shape[3] + saved[1])


def cut(
    memory: Tensor, specs: tuple[TensorSpec, ...], *, new: bool = False
) -> tuple[Tensor, ...] | None:
    """Return tensors of these specs that lie in `memory` one after the other, or None where they
    don't fit, or one of them would not begin at a multiple of 16 bytes.

    Args:
        memory: [bytes], uint8; with `new` as it was allocated.
        specs: of a kernel's saved outputs.
        new: the memory is uninitialised. Bytes that no kernel writes are zeroed, so that an op's
            outputs are the same whenever its inputs are.
    """
    end = 0
    places = []
    for spec in specs:
        places.append(end)
        if end % _ALIGNMENT:
            return None
        end += math.prod(spec.shape) * spec.dtype.itemsize
    if end > memory.numel():
        return None
    if new and end < memory.numel():
        memory[end:].zero_()
    origin = int(memory.storage_offset())
    if not memory.is_contiguous() or (memory.data_ptr() | origin) % _ALIGNMENT:
        # Between forward and backward, hooks of autograd may have packed the bytes anywhere.
        memory, origin = memory.clone(memory_format=torch.contiguous_format), 0
    storage = memory.untyped_storage()
    tensors = []
    for spec, begin in zip(specs, places, strict=True):
        # Takes a third of the time of slices and views of the bytes.
        tensor = torch.empty(0, dtype=spec.dtype, device=memory.device)
        place = (origin + begin) // spec.dtype.itemsize
        tensor.set_(storage, place, spec.shape)  # type: ignore[call-overload]
        tensors.append(tensor.zero_() if new and spec.zeroed else tensor)
    return tuple(tensors)
