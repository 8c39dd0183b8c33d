"""Clocks: wall time on the CPU, events on the device elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Clock", "DeviceClock", "Timed", "WallClock", "clock_of"]

_FLUSHED = 256 << 20
"""Bytes that are written between two calls, so that no input waits in a cache: more than any
device's last cache."""


@dataclass(frozen=True)
class Timed:
    """What is timed.

    Args:
        call: is given what `before` returned.
        before: runs before each call and isn't timed: the forward of a backward. None for calls
            that need nothing, which then stand back to back.
    """

    call: Callable[[Any], Any]
    before: Callable[[], Any] | None = None


class Clock:
    """Measures calls one after the other.

    Attributes:
        name: what a report says.
    """

    name = ""

    def seconds(self, timed: Timed, count: int) -> float:
        """Return the mean seconds of `count` calls."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until the device has done what it was given."""

    def once(self, timed: Timed) -> float:
        """Return the wall seconds of one call, compilation and waiting included."""
        ready = None if timed.before is None else timed.before()
        self.wait()
        begin = time.perf_counter()
        timed.call(ready)
        self.wait()
        return time.perf_counter() - begin


class WallClock(Clock):
    """time.perf_counter around calls back to back, and around the device's end of the last."""

    name = "wall, time.perf_counter"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def seconds(self, timed: Timed, count: int) -> float:
        if timed.before is not None:
            return math.fsum(self.once(timed) for _ in range(count)) / count
        self.wait()
        begin = time.perf_counter()
        for _ in range(count):
            timed.call(None)
        self.wait()
        return (time.perf_counter() - begin) / count


class DeviceClock(Clock):
    """Two events around each call. Caches are flushed before it, which also keeps the device busy
    while the host launches: what the host costs shows only where it costs more than that."""

    name = "device events, caches flushed"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flushed = torch.empty(_FLUSHED, dtype=torch.int8, device=device)

    def wait(self) -> None:
        torch.accelerator.synchronize(self.device)

    def seconds(self, timed: Timed, count: int) -> float:
        pairs = [
            [torch.Event(self.device.type, enable_timing=True) for _ in range(2)]
            for _ in range(count)
        ]
        for begin, end in pairs:
            ready = None if timed.before is None else timed.before()
            self.flushed.zero_()
            begin.record()
            timed.call(ready)
            end.record()
        self.wait()
        return math.fsum(begin.elapsed_time(end) for begin, end in pairs) / count / 1e3


def clock_of(device: torch.device, *, wall: bool = False) -> Clock:
    """Return the clock for calls on `device`: events, except on the CPU or if `wall` asks."""
    return WallClock(device) if wall or device.type == "cpu" else DeviceClock(device)
