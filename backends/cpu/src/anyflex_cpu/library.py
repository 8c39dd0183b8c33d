"""The native library: finding it, loading it once, and choosing the instruction-set level."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import anyflex_cpu
from anyflex.plugin import ArgumentError, free_in_child
from anyflex_cpu.structs import ABI

__all__ = [
    "ABI",
    "ISA_VARIABLE",
    "NAMES",
    "NEWER_COMPILER",
    "Library",
    "LibraryError",
    "find",
    "load",
]

ISA_VARIABLE = "ANYFLEX_CPU_ISA"
"""Variable that names the instruction-set level to run; unset: the best one. Read when the library
loads."""

NAMES = ("libanyflex_cpu.so", "anyflex_cpu.dll")
"""File names of the library; the second is that on Windows."""

NEWER_COMPILER = "install a newer compiler (gcc 11 and clang 13 know all) and anyflex-cpu again"
"""Cure for a library that was built without a level."""


class LibraryError(RuntimeError):
    """The library isn't there, can't be loaded, or is another version's. The message is one line
    and ends with the cure."""


class Library:
    """The loaded library.

    A call into it releases the interpreter's lock.

    Args:
        path: of the file.

    Attributes:
        level: name of the instruction-set level in use.

    Raises:
        LibraryError: it can't be loaded, or has another ABI.
        ArgumentError: ANYFLEX_CPU_ISA names a level that this processor can't run, or that the
            library was built without.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.handle = ctypes.CDLL(str(path))
            abi = self.handle.af_abi()
        except (OSError, AttributeError) as error:
            raise LibraryError(
                f"its native library can't be loaded ({error}); install anyflex-cpu again"
            ) from error
        if abi != ABI:
            raise LibraryError(
                f"its native library speaks ABI {abi} and its Python part ABI {ABI}; install "
                "anyflex-cpu again"
            )
        addresses = (ctypes.c_void_p, ctypes.c_void_p)
        self.forward = self._function("af_forward", ctypes.c_int32, *addresses)
        self.packed_forward = self._function("af_packed_forward", ctypes.c_int32, *addresses)
        self.packed_workspace = self._function(
            "af_packed_workspace", ctypes.c_int64, ctypes.c_void_p
        )
        self.backward = self._function("af_backward", ctypes.c_int32, *addresses)
        self.forward_workspace = self._function(
            "af_forward_workspace", ctypes.c_int64, ctypes.c_void_p
        )
        self.backward_workspace = self._function(
            "af_backward_workspace",
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
        )
        self.program_scratch = self._function(
            "af_program_scratch", ctypes.c_int64, ctypes.c_void_p
        )
        self._operations = self._function("af_operations", ctypes.c_char_p)
        self._variant = self._function("af_forward_variant", ctypes.c_char_p, ctypes.c_void_p)
        self._isa = self._function("af_isa", ctypes.c_char_p)
        self._available = self._function("af_isa_available", ctypes.c_char_p)
        self._left_out = self._function("af_isa_left_out", ctypes.c_char_p)
        self._set_isa = self._function("af_set_isa", ctypes.c_int32, ctypes.c_char_p)
        self._share_threads()
        self.level = _text(self._isa())
        wanted = os.environ.get(ISA_VARIABLE)
        if wanted:
            try:
                self.set_isa(wanted)
            except ArgumentError as error:
                raise ArgumentError(f"environment variable {ISA_VARIABLE}: {error}") from None

    def _function(self, name: str, result: type | None, *arguments: type) -> Callable[..., int]:
        try:
            function = self.handle[name]
        except AttributeError as error:
            raise LibraryError(
                f"its native library has no function {name}: it is of another version; install "
                "anyflex-cpu again"
            ) from error
        function.restype = result
        function.argtypes = arguments
        return function

    def _share_threads(self) -> None:
        """Run on torch's own OpenMP threads. Where the process exports none (macOS, Windows) the
        library makes its own."""
        if os.name == "nt":
            return
        # Finds the runtime that torch has loaded globally; another package's private copy isn't
        # found.
        process = ctypes.CDLL(None)
        try:
            found = [process[name] for name in ("GOMP_parallel", "omp_get_thread_num")]
        except AttributeError:
            return
        share = self._function("af_share_threads", None, ctypes.c_void_p, ctypes.c_void_p)
        share(*(ctypes.cast(function, ctypes.c_void_p) for function in found))

    def address(self, name: str) -> int:
        """Return the address of an exported function."""
        found = ctypes.cast(self.handle[name], ctypes.c_void_p).value
        assert found is not None
        return found

    def available(self) -> tuple[str, ...]:
        """Names of the built levels that this processor can run, best first."""
        return tuple(_text(self._available()).split(","))

    def left_out(self) -> tuple[str, ...]:
        """Names of the levels that this processor can run and that the compiler couldn't build."""
        return tuple(filter(None, _text(self._left_out()).split(",")))

    def set_isa(self, name: str) -> None:
        """Use another level from the next call on, in the whole process.

        Raises ArgumentError for a level that this processor can't run, or that isn't built.
        """
        if name in self.left_out():
            raise ArgumentError(
                f"{name!r} is an instruction-set level that the native library was built without: "
                f"its compiler doesn't know it; there are: {', '.join(self.available())}; "
                f"{NEWER_COMPILER} for the others"
            )
        if name not in self.available() or self._set_isa(name.encode()) != 0:
            raise ArgumentError(
                f"{name!r} is no instruction-set level that this processor can run; it can run: "
                f"{', '.join(self.available())}"
            )
        self.level = name

    def operations(self) -> str:
        """The interpreter's list of operations, a line each."""
        return _text(self._operations())

    def variant(self, problem: int) -> str:
        """Name the kernel that serves the af_problem at this address."""
        return _text(self._variant(problem))


def _text(value: object) -> str:
    assert isinstance(value, bytes)
    return value.decode()


def find() -> Path | None:
    """Return the library's file, or None where the package was installed without one."""
    # An editable installation has two folders: the sources', and the one with the built files.
    for folder in anyflex_cpu.__path__:
        for name in NAMES:
            path = Path(folder, name)
            if path.is_file():
                return path
    return None


_lock = threading.Lock()
free_in_child(sys.modules[__name__])
_loaded: Library | None = None


def load() -> Library:
    """Return the library, loaded at the first call.

    Raises:
        LibraryError, ArgumentError: see `Library`; also where there is no library.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            path = find()
            if path is None:
                raise LibraryError(
                    "it was installed without its native library: there was no C++ compiler, or "
                    "the build failed; install gcc (or clang) and anyflex-cpu again, with "
                    "ANYFLEX_CPU_REQUIRE_LIBRARY=1 to see why a build fails"
                )
            _loaded = Library(path)
        return _loaded
