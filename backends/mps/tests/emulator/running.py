"""Running a kernel's compiled library on memory, by the runtime's launch."""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .compiling import line_of, loaded, runtime_library
from .faults import KernelFault
from .numerics import LAYOUTS, SCHEDULES, Numerics
from .parts import Part

__all__ = ["Bound", "Library"]

_LOCK = threading.Lock()
"""The runtime's state is the process's: one launch at a time."""
_MESSAGE_BYTES = 2000
_MOST_ARGUMENTS = 64


class _Buffer(ctypes.Structure):
    """Mirror of the runtime's `launch_buffer`."""

    _fields_ = [
        ("at", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("guarded_begin", ctypes.c_void_p),
        ("guarded_end", ctypes.c_void_p),
        ("kind", ctypes.c_int),
    ]


class _Launch(ctypes.Structure):
    """Mirror of the runtime's `kernel_launch`."""

    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("threads", ctypes.c_uint * 3),
        ("group", ctypes.c_uint * 3),
        ("schedule", ctypes.c_int),
        ("seed", ctypes.c_uint),
        ("layout", ctypes.c_int),
        ("flushes_denormals", ctypes.c_int),
        ("ulps", ctypes.c_int),
        ("reversed_sums", ctypes.c_int),
        ("races", ctypes.c_int),
        ("granule_shift", ctypes.c_int),
        ("seconds", ctypes.c_double),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_int),
        ("kernel_name", ctypes.c_char_p),
        ("threadgroup_begin", ctypes.c_void_p),
        ("threadgroup_end", ctypes.c_void_p),
        ("variables", ctypes.c_void_p),
        ("variables_end", ctypes.c_void_p),
        ("code_begin", ctypes.c_void_p),
        ("code_end", ctypes.c_void_p),
    ]


class _Variable(ctypes.Structure):
    """Mirror of the shim's `emulated_variable`."""

    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
    ]


@dataclass(frozen=True)
class Bound:
    """Memory that is bound to a kernel's parameters.

    Attributes:
        at: address of its first byte.
        bytes: number of bytes.
        name: names of the parameters, for messages.
        kind: of the runtime's `buffer_kind`.
        guarded: begin and end of the reserved pages around it.
    """

    at: int
    bytes: int
    name: str
    kind: int
    guarded: tuple[int, int]


@functools.cache
def _runtime() -> ctypes.CDLL:
    runtime = loaded(runtime_library())
    for name in ("emulated_library_range", "emulated_launch"):
        getattr(runtime, name).restype = ctypes.c_int
    return runtime


class Library:
    """The compiled kernels of one source.

    Args:
        path: the library.
        source: its Metal source, for messages.
        parts: the source's parts, likewise.
        race: whether it is of the race build.
        granule_shift: exponent of the smallest element's size.
    """

    def __init__(
        self, path: Path, source: str, parts: Sequence[Part], *, race: bool, granule_shift: int
    ) -> None:
        self._path, self._race, self._granule_shift = path, race, granule_shift
        self._lines = source.split("\n")
        self._first_lines = {part.file: part.first_line for part in parts}
        self._runtime = _runtime()
        self._library = loaded(path)
        bounds = (ctypes.c_void_p * 4)()
        self._library.emulated_sections(bounds)
        self._sections = tuple(bounds)
        begin, end = ctypes.c_void_p(), ctypes.c_void_p()
        self._runtime.emulated_library_range(
            ctypes.cast(self._library.emulated_sections, ctypes.c_void_p),
            ctypes.byref(begin),
            ctypes.byref(end),
        )
        self._code = (begin.value or 0, end.value or 0)

    def threadgroup_bytes(self, kernel: str) -> int:
        """Return the bytes of a kernel's threadgroup variables, each aligned to 16."""
        count = (self._sections[3] - self._sections[2]) // ctypes.sizeof(_Variable)
        variables = (_Variable * count).from_address(self._sections[2])
        name = kernel.encode()
        return sum(-(-v.bytes // 16) * 16 for v in variables if v.kernel == name)

    def launch(
        self,
        kernel: str,
        arguments: Sequence[int],
        bound: Sequence[Bound],
        threads: Sequence[int],
        group: Sequence[int],
        *,
        schedule: str = "forward",
        seed: int = 0,
        numerics: Numerics | None = None,
        seconds: float = 60.0,
    ) -> None:
        """Run a kernel over a grid. Raises KernelFault at the first fault.

        Args:
            kernel: name of the kernel.
            arguments: address of each binding.
            bound: all memory that the kernel may touch.
            threads: threads of the grid [3].
            group: threads of a full threadgroup [3].
            schedule: an order of SCHEDULES.
            seed: what random choices begin from.
            numerics: the variant; the library is compiled for it.
            seconds: CPU time after which the kernel counts as endless; 0 for no limit.
        """
        numerics = numerics or Numerics()
        entry = getattr(self._library, f"emulated_entry_{kernel}")
        addresses = (ctypes.c_void_p * _MOST_ARGUMENTS)(*arguments)
        buffers = (_Buffer * max(len(bound), 1))(
            *(_Buffer(b.at, b.bytes, b.name.encode(), *b.guarded, b.kind) for b in bound)
        )
        launch = _Launch(
            entry=ctypes.cast(entry, ctypes.c_void_p),
            arguments=ctypes.cast(addresses, ctypes.c_void_p),
            threads=(ctypes.c_uint * 3)(*threads),
            group=(ctypes.c_uint * 3)(*group),
            schedule=SCHEDULES.index(schedule),
            seed=seed,
            layout=LAYOUTS.index(numerics.layout),
            flushes_denormals=numerics.flush_denormals,
            ulps=numerics.ulps,
            reversed_sums=numerics.reversed_sums,
            races=self._race,
            granule_shift=self._granule_shift,
            seconds=seconds,
            buffers=buffers,
            buffer_count=len(bound),
            kernel_name=kernel.encode(),
            threadgroup_begin=self._sections[0],
            threadgroup_end=self._sections[1],
            variables=self._sections[2],
            variables_end=self._sections[3],
            code_begin=self._code[0],
            code_end=self._code[1],
        )
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        with _LOCK:
            failed = self._runtime.emulated_launch(
                ctypes.byref(launch), message, ctypes.c_size_t(_MESSAGE_BYTES)
            )
        if failed:
            raise self._fault(kernel, message.value.decode())

    def _fault(self, kernel: str, message: str) -> KernelFault:
        """Return the error of a message, its places in the code as source lines."""
        lines: list[int] = []

        def named(found: re.Match[str]) -> str:
            # A call's return address belongs to what follows it.
            place = line_of(self._path, int(found[1], 16) - self._code[0] - 1)
            line = 0 if place is None else self._first_lines[place[0]] + place[1] - 1
            if not 0 < line <= len(self._lines):
                return "at an unknown line"
            lines.append(line)
            return f"line {line}: {self._lines[line - 1].strip()}"

        text = re.sub(r"\[code (0x[0-9a-f]+)\]", named, message)
        return KernelFault(kernel, text, tuple(lines))
