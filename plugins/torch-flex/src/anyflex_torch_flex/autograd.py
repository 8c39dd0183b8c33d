"""Autograd inside of one of torch's operators, where it is turned off."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

__all__ = ["autograd_records", "in_another_thread"]


def autograd_records() -> bool:
    """Whether autograd records: False inside of one of torch's operators, which torch runs below
    autograd."""
    with torch.enable_grad():
        return (torch.ones((), requires_grad=True, device="cpu") * 1).requires_grad


def in_another_thread(device: torch.device, work: Callable[[], None]) -> None:
    """Work where autograd records, on this thread's stream; raises what `work` raises.

    torch turns autograd off for the current thread only.
    """
    # A stream selects its device too.
    stream = nullcontext() if device.type == "cpu" else torch.accelerator.current_stream(device)

    def run() -> None:
        with stream:
            work()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()
