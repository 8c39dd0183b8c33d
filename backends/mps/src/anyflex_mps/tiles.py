"""Tiles of the kernels: rows of a threadgroup, rows or keys of a step, and the memory they take.

Apple GPUs give a threadgroup 32 KB of memory and a thread 128 registers of 32 bits, beyond which
it spills. Both are computed here from a kernel's fragments; the registers beside them (addresses,
indices, row values) were assumed to be 30, not measured.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from anyflex.plugin import Spec

__all__ = ["BYTES", "REGISTERS", "KernelName", "Tile", "pitch_of", "tile_for", "whole_fragments"]

KernelName = Literal["forward", "decode", "keys", "queries"]

BYTES = 32_768
"""Largest size of a threadgroup's memory."""
REGISTERS = 100
"""Largest number of a thread's registers that a kernel's fragments may take."""
_FRAGMENT = 8
_PADDING_BYTES = 16
"""Added to each staged row, so that rows of a fragment lie in different banks."""


def whole_fragments(dim: int) -> int:
    """Return a head dim, rounded up to whole fragments of 8 columns."""
    return -(-dim // _FRAGMENT) * _FRAGMENT


def pitch_of(dim: int, itemsize: int) -> int:
    """Return the elements from one staged row to the next."""
    return whole_fragments(dim) + _PADDING_BYTES // itemsize


@dataclass(frozen=True)
class Tile:
    """Shape of a threadgroup's work.

    Args:
        simdgroups: simdgroups of 8 rows each (in ``keys``, of 8 keys).
        step: keys (in ``keys``, query rows) that are staged at a time.
        stages_rows: whether the threadgroup's own rows are staged; if not, each lane reads its
            elements of them from device memory at every step.
        parts: parts of the columns of dK and dV, each of which is a threadgroup's own work.
        threadgroup_bytes: memory of staged rows, without flags.
        registers: of a thread's fragments.
    """

    simdgroups: int
    step: int
    stages_rows: bool
    parts: int
    threadgroup_bytes: int
    registers: int

    @property
    def rows(self) -> int:
        """Rows, or keys, of a threadgroup."""
        return _FRAGMENT * self.simdgroups

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 32 * self.simdgroups

    @property
    def fits(self) -> bool:
        """Whether memory and registers suffice; each simdgroup has a flag of 4 bytes."""
        memory = self.threadgroup_bytes + 4 * self.simdgroups
        return memory <= BYTES and self.registers <= REGISTERS


def _made(
    kernel: KernelName,
    dtype: torch.dtype,
    dims: tuple[int, int],
    simdgroups: int,
    step: int,
    stages_rows: bool,
    parts: int,
) -> Tile:
    pitch, value_pitch = (pitch_of(dim, dtype.itemsize) for dim in dims)
    columns, value_columns = (whole_fragments(dim) // _FRAGMENT for dim in dims)
    rows = _FRAGMENT * simdgroups if stages_rows else 0
    steps = step // _FRAGMENT
    # A lane holds two elements of a fragment.
    held = 2 if dtype is torch.float32 else 1
    if kernel in ("forward", "decode"):
        staged = rows * pitch + step * (pitch + value_pitch)
        registers = 2 * value_columns + (2 + held) * steps
    elif kernel == "keys":
        staged = (rows + step) * (pitch + value_pitch)
        registers = 2 * (-(-columns // parts) - (-value_columns // parts)) + (4 + 2 * held) * steps
    else:
        staged = (rows + step) * (pitch + value_pitch)
        registers = 2 * columns + 4 + held * steps
    return Tile(simdgroups, step, stages_rows, parts, staged * dtype.itemsize, registers)


def tile_for(kernel: KernelName, spec: Spec, rows: int | None = None) -> Tile:
    """Return the first tile that fits: all columns in one threadgroup, staged rows, then as many
    simdgroups and keys a step as possible.

    Args:
        rows: of a decoding call's tile; None for 32 and more.
    """
    most = 4 if rows is None else min(4, -(-rows // _FRAGMENT))
    return _first_that_fits(kernel, spec.dtype, (spec.head_dim, spec.value_head_dim), most)


@lru_cache(maxsize=1024)
def _first_that_fits(
    kernel: KernelName, dtype: torch.dtype, dims: tuple[int, int], most_simdgroups: int
) -> Tile:
    """Cached: each launch asks, and the search takes up to 0.1 ms."""
    shapes = itertools.product((1, 2, 4), (True, False), (4, 2, 1), (32, 16, 8))
    for parts, stages_rows, simdgroups, step in shapes:
        tile = _made(kernel, dtype, dims, simdgroups, step, stages_rows, parts)
        if simdgroups <= most_simdgroups and tile.fits and (parts == 1 or kernel == "keys"):
            return tile
    raise AssertionError(f"no tile of {kernel} for head dims {dims[0]} and {dims[1]}")
