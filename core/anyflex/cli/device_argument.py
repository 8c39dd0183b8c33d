"""``--device``, and the devices that torch sees."""

from __future__ import annotations

import torch

from anyflex.bench.usage_errors import NotRun, WrongUsage

__all__ = ["present_device", "seen_device_types"]


def present_device(text: str) -> torch.device:
    """Return the device that `text` names.

    Raises:
        WrongUsage: torch doesn't know such a device.
        NotRun: it isn't on this machine.
    """
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise WrongUsage(f"--device {text}: torch knows no such device type") from error
    try:
        torch.empty(1, device=device)
    # torch reports a missing device with a different exception per device type.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        seen = ", ".join(seen_device_types())
        raise NotRun(f"--device {text}: torch sees no such device (it sees: {seen})") from error
    return device


def seen_device_types() -> list[str]:
    """Return the device types that torch can compute on here, the CPU first."""
    seen = ["cpu"]
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            seen.append(accelerator.type)
    return seen
