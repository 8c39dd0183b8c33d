"""A spec's mods as programs on tiles: compiled in the process where llvmlite is there, else
bytecode for the library's interpreter."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from typing import Protocol

from anyflex.plugin import Artifacts, Derivative, ModGraph, Spec, differentiate, free_in_child
from anyflex_cpu import bytecode, structs
from anyflex_cpu.bytecode_steps import numbers
from anyflex_cpu.index_ranges import LIMITS, WIDE_LIMITS, Limits
from anyflex_cpu.jit import NativeFunction, TooLong, compile_mods
from anyflex_cpu.library import Library

__all__ = [
    "Compiled",
    "Interpreted",
    "Mods",
    "Programs",
    "llvmlite_version",
    "mods_of",
    "no_jit",
    "number_slots",
    "unusable_jit",
]


OLDEST_LLVMLITE = (0, 45)

LONGEST = 4_000_000
"""Maximum number of characters of LLVM IR that are compiled unasked. LLVM's time grows faster than
they do: a score mod that adds 300 tables [q_idx, kv_idx] has 2.2 million and takes 3 to 5 s, one
of 600 has twice as many and takes 20; the interpreter's bytecode is there at once."""


def no_jit() -> str:
    """Return why mods can't be compiled, or "" where llvmlite is installed. It isn't loaded, which
    takes 40 ms."""
    version = llvmlite_version()
    if version is None:
        return "no llvmlite"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_LLVMLITE:
        return f"llvmlite {version} is older than {'.'.join(map(str, OLDEST_LLVMLITE))}"
    return ""


def unusable_jit() -> str:
    """As `no_jit`, but loads llvmlite, and so finds an installation that doesn't load."""
    if reason := no_jit():
        return reason
    from anyflex_cpu.jit_engine import load_failure

    failure = load_failure()
    return f"llvmlite {llvmlite_version()} can't be loaded: {failure}" if failure else ""


@functools.cache
def _warn_of_llvmlite(reason: str) -> None:
    """Log once that an installed llvmlite isn't used: nobody asked for that."""
    logging.getLogger("anyflex").warning(
        "anyflex-cpu interprets mods, which is slower than to compile them: %s. Install llvmlite "
        "again, or uninstall it",
        reason,
    )


@functools.cache
def llvmlite_version() -> str | None:
    """Return the installed llvmlite's version without importing it, or None."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("llvmlite")
    except PackageNotFoundError:
        return None


class Mods:
    """A spec's graphs, ready to become programs.

    Args:
        mask: of PARTIAL blocks, or None.
        score: or None, where there is none or it returns the score.
        derivative: of the score mod, where some gradient is wanted; or None.
    """

    __slots__ = ("derivative", "mask", "score")

    def __init__(
        self, mask: ModGraph | None, score: ModGraph | None, derivative: Derivative | None
    ) -> None:
        self.mask = mask
        self.score = score
        self.derivative = derivative

    def __bool__(self) -> bool:
        return self.mask is not None or self.score is not None


def mods_of(spec: Spec) -> Mods:
    """Return the graphs of a spec."""
    score = spec.score_graph
    if score is not None:
        output = score.nodes[score.output]
        if output.operation == "input" and output.attribute == "score":
            score = None
    derivative = None
    if score is not None and spec.needs_backward:
        learned = (i for i, facts in enumerate(spec.captured) if facts.needs_grad)
        derivative = differentiate(score, wanted_captured=frozenset(learned))
    return Mods(spec.mask_graph, score, derivative)


def number_slots(spec: Spec) -> tuple[int, int]:
    """Return how many of a call's ints and floats the mods may read. A call can have more, because
    some have become constants."""
    last = {"i": -1, "f": -1}
    for graph in (spec.score_graph, spec.mask_graph):
        for node in () if graph is None else graph.nodes:
            if node.operation == "number":
                slot = str(node.attribute)
                last[slot[0]] = max(last[slot[0]], int(slot[1:]))
    return last["i"] + 1, last["f"] + 1


class _Made(Protocol):
    """The af_programs of mask, score and score's derivative; an address is 0 where there is no
    program. They live as long as the object."""

    addresses: tuple[int, int, int]


class Programs:
    """A spec's programs: those for calls within `LIMITS`, which compute most integers in 32 bits,
    and, once a call is larger, those for any call.

    Args:
        spec: what the mods belong to.
        library: the loaded library.
        artifacts: where compiled code is kept between processes.
        option: ``"auto"``, ``"jit"`` or ``"interpreter"``.

    Attributes:
        how: ``"jit"`` or ``"interpreted"``, or "" where there are no mods.
        reason: why they are interpreted where nobody asked for it, or "".
        addresses: of the af_programs of mask, score and score's derivative, 0 for none, for calls
            within `LIMITS`.
    """

    def __init__(self, spec: Spec, library: Library, artifacts: Artifacts, option: str) -> None:
        self._spec = spec
        self._library = library
        self._artifacts = artifacts
        self._option = option
        self._mods = mods_of(spec)
        self._lock = threading.Lock()
        free_in_child(self)
        self._wide: _Made | None = None
        self.how = self.reason = ""
        if self._mods:
            if option == "auto":
                self.reason = unusable_jit()
                if self.reason and not no_jit():
                    _warn_of_llvmlite(self.reason)
            interpreted = option == "interpreter" or self.reason
            self.how = "interpreted" if interpreted else "jit"
        self._narrow = self._make(LIMITS)
        self.addresses = self._narrow.addresses

    def wide_addresses(self) -> tuple[int, int, int]:
        """Return `addresses` for calls of any size; the first one makes them."""
        with self._lock:
            if self._wide is None:
                self._wide = self._make(WIDE_LIMITS)
            return self._wide.addresses

    def _make(self, limits: Limits) -> _Made:
        if self.how == "jit":
            try:
                return Compiled(
                    self._spec,
                    self._mods,
                    self._library,
                    self._artifacts,
                    limits,
                    LONGEST if self._option == "auto" else None,
                )
            except TooLong as error:
                # `how` and `reason` describe calls of all sizes, so the limits don't matter here.
                self.how, self.reason = "interpreted", str(error)
        return Interpreted(self._spec, self._mods, self._library, limits)


class Interpreted:
    """Bytecode for the library's interpreter, which checks it.

    Args:
        spec: what the mods belong to.
        mods: a spec's graphs.
        library: whose interpreter runs them.
        limits: what calls keep to.
    """

    def __init__(self, spec: Spec, mods: Mods, library: Library, limits: Limits) -> None:
        operations = numbers(library.operations())
        codes: list[bytes | None] = [
            None if mods.mask is None else bytecode.mask_program(mods.mask, operations, limits),
            None if mods.score is None else bytecode.score_program(mods.score, operations, limits),
            None
            if mods.derivative is None
            else bytecode.score_backward_program(mods.derivative, operations, limits),
        ]
        self._held: list[object] = []
        self._slots = (len(spec.captured), *number_slots(spec))
        mask, score, backward = (
            0 if code is None else self._held_at(code, library) for code in codes
        )
        self.addresses = (mask, score, backward)

    def _held_at(self, code: bytes, library: Library) -> int:
        # 8-byte words, because bytecode is aligned to them.
        words = (ctypes.c_int64 * -(-len(code) // 8)).from_buffer_copy(code)
        at = ctypes.addressof(words)
        if not library.check_program(at, len(code), *self._slots):
            raise RuntimeError("the native library finds bytecode of anyflex_cpu malformed")
        function = library.address("af_interpret")
        scratch = library.program_scratch(at, len(code))
        program = structs.Program(function, at, len(code), scratch)
        self._held += [words, program]
        return ctypes.addressof(program)


class Compiled:
    """Native code, from the artifacts if it is there.

    Args:
        spec: what the mods belong to.
        mods: its graphs.
        library: what the code calls for a read outside of a captured tensor.
        artifacts: where the code is kept.
        limits: what calls keep to.
        longest: characters of IR that are compiled at most, or None for any number.

    Raises:
        TooLong: the mods' IR is longer than `longest`.
    """

    def __init__(
        self,
        spec: Spec,
        mods: Mods,
        library: Library,
        artifacts: Artifacts,
        limits: Limits,
        longest: int | None = None,
    ) -> None:
        self._code = compile_mods(
            mods.mask,
            mods.score,
            mods.derivative,
            captured=spec.captured,
            artifacts=artifacts,
            note_read_outside=library.address("af_note_read_outside"),
            limits=limits,
            longest=longest,
        )
        self._held: list[structs.Program] = []
        code = self._code
        mask, score, backward = map(self._program, (code.mask, code.score, code.score_backward))
        self.addresses = (mask, score, backward)

    def _program(self, function: NativeFunction | None) -> int:
        if function is None:
            return 0
        program = structs.Program(function.address, None, 0, function.scratch_bytes)
        self._held.append(program)
        return ctypes.addressof(program)
