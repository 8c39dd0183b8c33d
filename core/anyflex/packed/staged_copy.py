"""StagedCopy: numbers of the host, on the device by one asynchronous copy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anyflex.errors import ArgumentTypeError

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

    def send(self, numbers: Sequence[int]) -> None:
        """Write `numbers` to the start of the target, in the order of the current stream."""
        try:
            values = torch.frombuffer(array("i", numbers), dtype=torch.int32)
        except (TypeError, OverflowError) as error:
            raise ArgumentTypeError(f"lengths and slots must be ints of 32 bits: {error}.") from (
                error
            )
        target = self._target[: values.shape[0]]
        if not self._buffers:
            target.copy_(values)
            return
        buffer, event = self._buffers[self._turn]
        self._turn = 1 - self._turn
        event.synchronize()
        staged = buffer[: values.shape[0]].copy_(values)
        target.copy_(staged, non_blocking=True)
        event.record(torch.accelerator.current_stream(target.device))
