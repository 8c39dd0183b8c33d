"""Stand-in for `torch.mps.compile_shader` on CPU tensors that pose as MPS tensors.

The call's syntax, casts and dispatch rules are those of torch 2.13 to 2.15; the arithmetic is the
emulator's. It refuses what crashes torch, reads stale bindings or depends on what is unproven.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .compiling import compiled
from .faults import KernelFault
from .memory import Guarded, Region, regions_of
from .metal_source import CONSTANT, WRITABLE, Buffer, Instance, granule_shift, kernels_of
from .numerics import SCHEDULES, Numerics
from .parts import parts_of
from .running import Bound, Library

__all__ = ["EmulatedKernel", "EmulatedLibrary", "compile_shader"]

MOST_THREADS = 1024
"""Largest number of threads of a threadgroup."""
MOST_THREADGROUP_BYTES = 32768
MOST_BUFFERS = 31
MOST_SET_BYTES = 4096
"""Largest number of bytes that `setBytes` takes: of a number or a list."""
SIMDGROUP = 32
UNTRACKED = 3
"""The runtime's kind of a buffer that is bound in place."""

_CASTS = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}

Scalar = int | float
Argument = torch.Tensor | Scalar | Sequence[Scalar]
Schedule = str | Callable[[], str]


def _order(schedule: Schedule) -> str:
    order = schedule if isinstance(schedule, str) else schedule()
    if order not in SCHEDULES:
        raise ValueError(f"schedule must be one of {SCHEDULES}, got {order!r}")
    return order


def _packed(values: Sequence[Scalar], cast: str) -> torch.Tensor:
    """Return numbers as torch packs them: the first one's type decides."""
    if cast and cast not in _CASTS:
        raise RuntimeError(f"Unsupported cast instruction {cast}")
    wide = torch.float32 if isinstance(values[0], float) else torch.int64
    packed = torch.tensor([float(v) for v in values] if wide.is_floating_point else values)
    return packed.to(wide).to(_CASTS[cast] if cast else wide)


class EmulatedKernel:
    """A kernel of a compiled library, called as torch's.

    Attributes:
        max_threads_per_threadgroup: largest number of threads of a threadgroup.
        thread_execution_width: lanes of a simdgroup.
        static_thread_group_memory_length: bytes of threadgroup memory.
    """

    def __init__(
        self,
        library: Library,
        name: str,
        buffers: Sequence[Buffer],
        *,
        schedule: Schedule,
        seed: int,
        numerics: Numerics,
        seconds: float,
    ) -> None:
        self._library, self._name, self._buffers = library, name, buffers
        self._schedule, self._seed, self._numerics = schedule, seed, numerics
        self._seconds = seconds
        self.max_threads_per_threadgroup = MOST_THREADS
        self.thread_execution_width = SIMDGROUP
        self.static_thread_group_memory_length = library.threadgroup_bytes(name)
        if self.static_thread_group_memory_length > MOST_THREADGROUP_BYTES:
            raise RuntimeError(
                "Failed to created pipeline state object, error: Threadgroup memory size "
                f"({self.static_thread_group_memory_length}) exceeds the maximum threadgroup "
                f"memory allowed ({MOST_THREADGROUP_BYTES})"
            )

    def __call__(
        self,
        *arguments: Argument,
        threads: int | Sequence[int] | None = None,
        group_size: int | Sequence[int] | None = None,
        arg_casts: str | Mapping[int, str] | None = None,
        error_buf_idx: int | None = None,
    ) -> None:
        """Run the kernel; positional arguments are bound to buffers 0, 1, ... in order.

        Args:
            arguments: tensors, numbers, and lists of numbers.
            threads: threads of the whole grid, up to three dimensions; default: the elements of
                the first tensor.
            group_size: threads of a threadgroup, as many dimensions.
            arg_casts: narrower types of numbers, for all or by the argument's index.
            error_buf_idx: not emulated.
        """
        if error_buf_idx is not None:
            raise NotImplementedError("error_buf_idx isn't emulated")
        if len(arguments) != len(self._buffers):
            raise TypeError(
                f"{self._name} has {len(self._buffers)} buffers and got {len(arguments)} "
                "arguments: Metal would read a binding of an earlier kernel"
            )
        casts = [
            arg_casts if isinstance(arg_casts, str) else (arg_casts or {}).get(i, "")
            for i in range(len(arguments))
        ]
        tensors, packed = {}, {}
        for i, (argument, cast) in enumerate(zip(arguments, casts, strict=True)):
            if isinstance(argument, torch.Tensor):
                tensors[i] = self._tensor(i, argument)
            else:
                packed[i] = self._numbers(i, argument, cast)
        grid, group = self._grid(threads, group_size, tensors)
        if 0 not in grid:
            self._launch(tensors, packed, grid, group)

    def _tensor(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float64 or tensor.dtype.is_complex:
            raise TypeError(
                f"argument {index} of {self._name} is {tensor.dtype}: Metal has no such type"
            )
        if tensor.device.type != "cpu":
            raise TypeError(
                f"argument {index} of {self._name} is on {tensor.device}: the emulator takes CPU "
                "tensors that pose as MPS tensors"
            )
        return tensor.detach()

    def _numbers(self, index: int, argument: object, cast: str) -> torch.Tensor:
        values: list[Any] = list(argument) if isinstance(argument, (list, tuple)) else [argument]
        if not values:
            raise RuntimeError("Empty list/tuple can not be an argument to metal kernel")
        if isinstance(values[0], torch.Tensor):
            raise NotImplementedError(
                f"argument {index} of {self._name} is a list of tensors: torch passes their "
                "addresses without making them resident"
            )
        if not all(isinstance(value, (int, float)) for value in values):
            raise RuntimeError("Unsupported argument type")
        packed = _packed(values, cast)
        if packed.nbytes > MOST_SET_BYTES:
            raise RuntimeError(
                f"argument {index} of {self._name} has {packed.nbytes} bytes: setBytes takes "
                f"{MOST_SET_BYTES}; pass a tensor"
            )
        return packed

    def _grid(
        self,
        threads: int | Sequence[int] | None,
        group_size: int | Sequence[int] | None,
        tensors: Mapping[int, torch.Tensor],
    ) -> tuple[list[int], list[int]]:
        """Return the threads of the grid and of a threadgroup, three dimensions each."""
        if threads is None and tensors:
            threads = tensors[min(tensors)].numel()
        if threads is None:
            raise RuntimeError("Number of threads is undefined")
        grid = [threads] if isinstance(threads, int) else list(threads)
        if not 1 <= len(grid) <= 3:
            raise RuntimeError("Number of threads is undefined or has wrong dimension")
        if group_size is None:
            group = [MOST_THREADS if len(grid) > 1 else min(grid[0], MOST_THREADS)]
            group += [1] * (len(grid) - 1)
        else:
            group = [group_size] if isinstance(group_size, int) else list(group_size)
        if len(group) != len(grid):
            raise RuntimeError("threads and group_size differ in their number of dimensions")
        if math.prod(group) > MOST_THREADS:
            raise ValueError(f"Threadgroup size exceeds {MOST_THREADS} limit")
        if min(group) < 1 and 0 not in grid:
            raise ValueError(f"group_size must be positive, got {group}")
        if max(grid) >= 1 << 32 or min(grid) < 0:
            raise RuntimeError(f"threads must be from 0 to 2^32 - 1 in each dimension, got {grid}")
        ones = [1] * (3 - len(grid))
        return [*grid, *ones], [*group, *ones]

    def _launch(
        self,
        tensors: Mapping[int, torch.Tensor],
        packed: Mapping[int, torch.Tensor],
        grid: Sequence[int],
        group: Sequence[int],
    ) -> None:
        regions = dict(zip(tensors, regions_of(list(tensors.values())), strict=True))
        of_region: dict[int, list[int]] = {}
        for i, region in regions.items():
            of_region.setdefault(id(region), []).append(i)
        addresses = [0] * len(self._buffers)
        bound: list[Bound] = []
        copies: list[Guarded] = []
        used: list[tuple[Region, str, int]] = []
        try:
            for indices in of_region.values():
                region = regions[indices[0]]
                kind = min(self._buffers[i].kind for i in indices)
                name = ", ".join(self._label(i) for i in indices)
                region.copy_in(read_only=kind != WRITABLE)
                used.append((region, name, kind))
                bound.append(_bound(region, name, kind))
                for i in indices:
                    addresses[i] = region.at + tensors[i].data_ptr() - region.begin
            for i, numbers in packed.items():
                copy = Guarded(numbers.nbytes, numbers.nbytes)
                copies.append(copy)
                ctypes.memmove(copy.at, numbers.data_ptr(), numbers.nbytes)
                copy.protect()
                addresses[i] = copy.at
                guarded = (copy.begin, copy.end)
                bound.append(Bound(copy.at, copy.bytes, self._label(i), CONSTANT, guarded))
            try:
                self._library.launch(
                    self._name,
                    addresses,
                    bound,
                    grid,
                    group,
                    schedule=_order(self._schedule),
                    seed=self._seed,
                    numerics=self._numerics,
                    seconds=self._seconds,
                )
            except KernelFault:
                # The first fault is the one to tell.
                for region, _, kind in used:
                    if kind == WRITABLE:
                        region.copy_back()
                raise
            self._copy_back(used)
        finally:
            for region, _, _ in used:
                region.free()
            for copy in copies:
                copy.free()

    def _copy_back(self, used: Sequence[tuple[Region, str, int]]) -> None:
        for region, name, kind in used:
            wrong = region.copy_back() if kind == WRITABLE else None
            if wrong:
                raise KernelFault(self._name, f"writes to {name} {wrong}")

    def _label(self, index: int) -> str:
        return f"buffer {index} {self._buffers[index].name!r}"


def _bound(region: Region, name: str, kind: int) -> Bound:
    size = region.end - region.begin
    if region.guarded is None:
        kind = UNTRACKED if kind == WRITABLE else kind
        return Bound(region.begin, size, name, kind, (region.begin, region.end))
    return Bound(region.at, size, name, kind, (region.guarded.begin, region.guarded.end))


@functools.lru_cache(maxsize=500)
def _library(
    source: str,
    race: bool,
    numerics: Numerics,
    include: tuple[str, ...],
    instances: tuple[tuple[str, Instance], ...],
) -> tuple[Mapping[str, Sequence[Buffer]], Library]:
    """Return the buffers of each kernel, and the compiled kernels."""
    kernels = kernels_of(source)
    buffers = {name: kernel.buffers for name, kernel in kernels.items()}
    for name, instance in instances:
        buffers[name] = kernels[instance.kernel].buffers
    for name in buffers:
        _check_buffers(name, buffers[name])
    # Products and sums contract across functions that are inlined alone.
    inlined = numerics.contract or numerics.fast_math
    parts = parts_of(source, kernels, dict(instances), whole=inlined)
    path = compiled(parts, race=race, numerics=numerics, include=include)
    library = Library(path, source, parts, race=race, granule_shift=granule_shift(source))
    return buffers, library


class EmulatedLibrary:
    """Result of `compile_shader`: kernels by attribute, a new object each time, as torch's."""

    def __init__(
        self,
        source: str,
        *,
        race: bool = False,
        schedule: Schedule = "forward",
        seed: int = 0,
        numerics: Numerics | None = None,
        include: Sequence[str | Path] = (),
        instances: Mapping[str, Instance] | None = None,
        seconds: float = 60.0,
    ) -> None:
        _order(schedule)
        source.encode("ascii")
        self._schedule, self._seed, self._seconds = schedule, seed, seconds
        self._numerics = numerics or Numerics()
        self._buffers, self._library = _library(
            source,
            race,
            self._numerics,
            tuple(str(folder) for folder in include),
            tuple((instances or {}).items()),
        )

    def __dir__(self) -> list[str]:
        return list(self._buffers)

    def __getattr__(self, name: str) -> EmulatedKernel:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._buffers:
            raise RuntimeError(f"Failed to create function state object for: {name}")
        return EmulatedKernel(
            self._library,
            name,
            self._buffers[name],
            schedule=self._schedule,
            seed=self._seed,
            numerics=self._numerics,
            seconds=self._seconds,
        )


def _check_buffers(name: str, buffers: Sequence[Buffer]) -> None:
    """Raise SyntaxError where Apple's compiler, or the way that we call, refuses the bindings."""
    indices = [buffer.index for buffer in buffers]
    if len(buffers) > MOST_BUFFERS or any(index >= MOST_BUFFERS for index in indices):
        raise SyntaxError(
            f"{name}: 'buffer' attribute parameter is out of bounds: must be between 0 and "
            f"{MOST_BUFFERS - 1}"
        )
    if sorted(indices) != list(range(len(buffers))):
        raise SyntaxError(f"{name}: indices of buffers must be 0, 1, 2, ..., got {indices}")


def compile_shader(
    source: str,
    *,
    race: bool = False,
    schedule: Schedule = "forward",
    seed: int = 0,
    numerics: Numerics | None = None,
    include: Sequence[str | Path] = (),
    instances: Mapping[str, Instance] | None = None,
    seconds: float = 60.0,
) -> EmulatedLibrary:
    """Compile Metal source. Raises SyntaxError with clang's messages.

    Args:
        source: text in ASCII.
        race: check data races, bounds of every buffer and undefined arithmetic exactly: 3 to 5
            times as slow.
        schedule: order in which threads run, of SCHEDULES, or what says it at each launch.
        seed: what the random schedule, and random errors of `numerics`, begin from.
        numerics: numeric variant.
        include: folders of headers, for sources of others. With any, the race build doesn't check
            address spaces.
        instances: kernels that are instances of templates, by name.
        seconds: CPU time of a launch after which the kernel counts as endless; 0 for no limit.
    """
    return EmulatedLibrary(
        source,
        race=race,
        schedule=schedule,
        seed=seed,
        numerics=numerics,
        include=include,
        instances=instances,
        seconds=seconds,
    )
