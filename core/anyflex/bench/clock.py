"""Clocks: wall time on the CPU, events on the device elsewhere, around calls or a CUDA graph of
one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

__all__ = ["Clock", "ClockName", "DeviceClock", "GraphClock", "Timed", "WallClock", "clock_of"]

_FLUSHED = 256 << 20
"""Bytes that are written between two calls, so that no input waits in a cache: more than any
device's last cache."""


@dataclass(frozen=True)
class Timed:
    """A measured call.

    Args:
        call: takes the result of `before`.
        before: runs before each call and isn't timed: the forward of a backward. None for calls
            that need nothing, which then run back to back.
    """

    call: Callable[[Any], Any]
    before: Callable[[], Any] | None = None


class Clock:
    """Measures calls one after the other.

    Attributes:
        name: as in reports.
    """

    name = ""

    def seconds(self, timed: Timed, count: int) -> float:
        """Return the mean seconds of `count` calls."""
        raise NotImplementedError

    def refusal(self, timed: Timed) -> str | None:
        """Return why it can't be timed, or None."""
        return None

    def readied(self, timed: Timed) -> Timed:
        """Return the object that is timed in place of a call that has been made once."""
        return timed

    def wait(self) -> None:
        """Wait until the device has finished its queued work."""

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
    while the host launches: the host's time shows only where it exceeds that."""

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


class GraphClock(DeviceClock):
    """Two events around the replay of a CUDA graph of one call: the device's time without the
    host's, however small the call."""

    name = "device events around a CUDA graph of one call, caches flushed"

    def refusal(self, timed: Timed) -> str | None:
        """Refuse backwards: the graph of one would read a forward that is made once."""
        return None if timed.before is None else "no CUDA graph of a backward alone"

    def readied(self, timed: Timed) -> Timed:
        """Capture the call. Raises torch's error if it can't be captured."""
        graph = torch.cuda.CUDAGraph()
        # A graph belongs to the current device's streams.
        with torch.cuda.device(self.device):
            # Compiles what a second call still compiles, on another stream, as capturing requires.
            beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                timed.call(None)
            torch.cuda.current_stream().wait_stream(beside)
            with torch.cuda.graph(graph):
                timed.call(None)
        return Timed(lambda _: graph.replay())


ClockName = Literal["device", "wall", "graph"]


def clock_of(device: torch.device, name: ClockName = "device") -> Clock:
    """Return a clock for calls on `device`; on the CPU there is one, whatever the name."""
    if name == "wall" or device.type == "cpu":
        return WallClock(device)
    return GraphClock(device) if name == "graph" else DeviceClock(device)
