"""StagedCopy: numbers of the host, on the device by one asynchronous copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["StagedCopy"]


class StagedCopy:
    """Copies int32 numbers into a tensor without waiting for its device.

    Two pinned buffers take turns: a buffer is written again only when the copy from it has ended,
    which is two steps later and therefore costs no wait in practice.

    Args:
        target: int32 [n], contiguous.
    """

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._turn = 0
        self._buffers: list[tuple[Tensor, Any]] = []
        if target.device.type != "cpu":
            for _ in range(2):
                buffer = torch.empty(target.shape, dtype=torch.int32, pin_memory=True)
                self._buffers.append((buffer, torch.Event(target.device)))

    def send(self, numbers: Tensor) -> None:
        """Write `numbers`, int32 [n] on the host, to the target, in the order of the current
        stream."""
        if not self._buffers:
            self._target.copy_(numbers)
            return
        buffer, event = self._buffers[self._turn]
        self._turn = 1 - self._turn
        event.synchronize()
        buffer.copy_(numbers)
        self._target.copy_(buffer, non_blocking=True)
        event.record(torch.accelerator.current_stream(self._target.device))
