"""A backend that notes the rectangles of pairs that its mods run on, in their order."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from anyflex.plugin import Artifacts, Kernel, Spec
from anyflex_cpu import structs
from anyflex_cpu.backend import CpuBackend
from anyflex_cpu.kernel import CpuKernel

__all__ = ["NAME", "PRODUCT", "STEP", "Visit", "WatchedBackend", "visits"]

NAME = "cpu.watched"
STEP = 32
"""Number of columns that kernels skip together; also forward's rows of a strip and backward's of a
group."""
PRODUCT = 4.0
"""Score of a query and a key of ones, with 16 elements."""
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(structs.Tile))


class Visit(NamedTuple):
    """A tile that a score mod, or its derivative, has run on.

    `sums` is the address of the first captured tensor's accumulator, or 0. `computed` are the
    first keys of those `STEP` of the tile whose scores a product has just made `PRODUCT`.
    """

    backward: bool
    b: int
    h: int
    q: int
    rows: int
    kv: int
    columns: int
    sums: int
    computed: tuple[int, ...]

    @property
    def pairs(self) -> int:
        return self.rows * self.columns


visits: list[Visit] = []
"""Visits of all calls until the list is cleared. Their order is defined for calls on one
thread."""


class WatchedBackend(CpuBackend):
    """The CPU backend with interpreted mods, watched."""

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        spec = dataclasses.replace(spec, options=(("mods", "interpreter"),))
        kernel = super().compile(spec, artifacts)
        assert isinstance(kernel, CpuKernel)
        _, score, derivative = kernel.programs.addresses
        for address, backward in ((score, False), (derivative, True)):
            if address:
                _watch(structs.Program.from_address(address), backward)
        return kernel


def _computed(tile: structs.Tile) -> tuple[int, ...]:
    """First columns of the steps that hold `PRODUCT`. Each is then overwritten, so that a step
    that isn't computed again lacks it."""
    floats = (ctypes.c_float * (tile.ld * (tile.rows - 1) + tile.cols)).from_address(tile.score)
    scores = torch.frombuffer(floats, dtype=torch.float32)
    scores = scores.as_strided((tile.rows, tile.cols), (tile.ld, 1))
    found = (scores == PRODUCT).any(0)
    scores[scores == PRODUCT] = -1.0
    steps = range(0, tile.cols, STEP)
    return tuple(tile.kv + first for first in steps if found[first : first + STEP].any())


_held: list[Callable[..., None]] = []


def _watch(program: structs.Program, backward: bool) -> None:
    plain = _FUNCTION(program.function)

    def noting(program: int, at: ctypes._Pointer[structs.Tile]) -> None:
        tile = at.contents
        sums = 0
        if backward and tile.captured_grad:
            sums = ctypes.c_void_p.from_address(tile.captured_grad).value or 0
        where = (tile.b, tile.h, tile.q, tile.rows, tile.kv, tile.cols)
        computed = () if backward else _computed(tile)
        visits.append(Visit(backward, *where, sums, computed))
        plain(program, at)

    function = _FUNCTION(noting)
    _held.append(function)
    program.function = ctypes.cast(function, ctypes.c_void_p).value
