"""Equality of block masks: by content, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from anyflex.mask_structure.device_views import MaskViews
    from anyflex.tracing.trace import TracedMod

__all__ = ["same_mod", "same_structure", "structure_hash"]

_CPU = torch.device("cpu")
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def structure_hash(views: MaskViews) -> int:
    """Return a hash of lengths, block size and runs. Reads a device's runs once, on the host."""
    host = views.on(_CPU)
    used = (*host.offsets.flatten().tolist(), *_used_runs(host).flatten().tolist())
    return hash((host.q_length, host.kv_length, host.block_size, host.shape, used))


def _used_runs(host: MaskViews) -> Tensor:
    return host.runs[: int(host.offsets[-1, -1, -1]) if host.offsets.numel() else 0]


def same_structure(a: MaskViews, b: MaskViews) -> bool:
    """Tell whether two masks visit the same blocks in the same way."""
    if (a.q_length, a.kv_length, a.block_size) != (b.q_length, b.kv_length, b.block_size):
        return False
    a, b = a.on(_CPU), b.on(_CPU)
    return torch.equal(a.offsets, b.offsets) and torch.equal(_used_runs(a), _used_runs(b))


def same_mod(a: TracedMod | None, b: TracedMod | None) -> bool:
    """Tell whether two traced mods compute the same: graph, numbers, captured values.

    Numbers and values are compared by their bits: NaN equals itself, and 0.0 is not -0.0.
    """
    if a is None or b is None:
        return a is b
    if a.text != b.text or a.ints != b.ints or len(a.captured) != len(b.captured):
        return False
    if [float(x).hex() for x in a.floats] != [float(x).hex() for x in b.floats]:
        return False
    return all(_same_values(x, y) for x, y in zip(a.captured, b.captured, strict=True))


def _same_values(x: Tensor, y: Tensor) -> bool:
    if x is y:
        return True
    if x.dtype != y.dtype or x.shape != y.shape or "meta" in (x.device.type, y.device.type):
        return False
    x, y = x.detach(), y.detach().to(x.device)
    if x.dtype.is_floating_point:
        bits = _BITS.get(x.dtype.itemsize, torch.uint8)
        x, y = x.contiguous().view(bits), y.contiguous().view(bits)
    return torch.equal(x, y)
