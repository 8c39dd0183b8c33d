"""Stand-in devices of tests: CPU tensors that pose as tensors of an absent device."""

from __future__ import annotations

import torch

__all__ = ["Posed", "pose", "posed_as", "posed_in_force", "stands_in_for"]

Posed = tuple[str, str]
"""Device that CPU tensors stand in for: its type and architecture."""

# A plain global of the process: Dynamo, which traces its reader, puts a guard on it.
current: Posed | None = None


def posed_as(device: torch.device) -> Posed | None:
    """Return the device that a tensor on `device` stands in for, or None for itself. On the hot
    path."""
    return None if current is None or device.type != "cpu" else current


def posed_in_force() -> Posed | None:
    """Return the device that CPU tensors stand in for, or None."""
    return current


def stands_in_for(device_type: str) -> bool:
    """Whether CPU tensors stand in for this type of device, which no probe finds then."""
    return current is not None and current[0] == device_type


def pose(posed: Posed | None) -> None:
    """Let CPU tensors stand in for another device: for `anyflex.testing.posing`."""
    global current
    current = posed
