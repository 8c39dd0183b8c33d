"""Command buffers of bounded work: macOS ends what holds the GPU for seconds at a stretch.

torch gathers launches in a command buffer until something waits for the GPU, or until one of its
own operations commits it. If macOS ends a buffer, torch raises nothing and results are incomplete.
So a long launch is made in parts, and a buffer with enough work is committed, without waiting.
"""

from __future__ import annotations

import torch

__all__ = ["BufferedWork", "part_of"]

_MOST_WORK = 1 << 33
"""Multiply-adds of a command buffer per core. A core of an M1, the slowest, makes 1.6e11 a second
at its peak: a buffer takes 0.05 seconds there, and at a hundredth of it 5, which users report as
the limit."""
_LEAST_GROUPS = 4
"""Least number of threadgroups per core in a part of a launch: fewer leave cores idle. A mask's
work is unknown to the host, so that parts are chosen as if all pairs were live."""


def part_of(work: int, places: int, beside: int, cores: int) -> int:
    """Return how many of the places of one dimension of a grid a part of a launch takes.

    Args:
        work: multiply-adds of the whole launch.
        places: threadgroups in that dimension, at least 1.
        beside: threadgroups of each of the places.
        cores: of the GPU.
    """
    short = _MOST_WORK * cores * places // max(work, 1)
    return min(places, max(short, -(-_LEAST_GROUPS * cores // beside), 1))


class BufferedWork:
    """Counts the work of one spec's launches since it committed a command buffer. Threads that
    count at the same time may lose some of it, which the limit has room for.

    Args:
        cores: of the GPU.
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._work = 0

    def add(self, work: int, device: torch.device) -> None:
        """Count multiply-adds of a launch, and commit the buffer if they are enough."""
        self._work += work
        if self._work < _MOST_WORK * self._cores:
            return
        self._work = 0
        _commit(device)


def _commit(device: torch.device) -> None:
    if device.type == "mps":
        # The one public function of torch that commits without waiting.
        torch.mps.Event().record()
