"""A spec's mods as programs on tiles: compiled in the process where llvmlite is there, else
bytecode for the library's interpreter."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from anyflex.plugin import Artifacts, Derivative, ModGraph, Spec, differentiate, free_in_child
from anyflex_cpu import structs
from anyflex_cpu.bytecode import mask_program, score_backward_program, score_program
from anyflex_cpu.bytecode_steps import numbers
from anyflex_cpu.index_ranges import LIMITS, WIDE_LIMITS, Limits
from anyflex_cpu.jit import Mods, NativeFunction, TooLong, compile_mods
from anyflex_cpu.library import Library
from anyflex_cpu.owned_captured import NOTHING_OWNED, owned_captured

__all__ = [
    "Programs",
    "llvmlite_version",
    "mods_of",
    "no_jit",
    "number_slots",
    "unusable_jit",
]

_Graph = TypeVar("_Graph", ModGraph, Derivative)

OLDEST_LLVMLITE = (0, 45)

LONGEST = 3_000_000
"""Maximum number of characters of LLVM IR that are compiled unasked. LLVM's time grows faster than
they do: a score mod that adds 300 tables [q_idx, kv_idx] has 1.7 million and takes 3 to 5 s, one
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


def mods_of(spec: Spec) -> Mods:
    """Return the graphs of a spec that become programs."""
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
    graphs = (spec.score_graph, spec.mask_graph)
    slots = [graph.number_slots() for graph in graphs if graph is not None]
    return max([ints for ints, _ in slots], default=0), max([f for _, f in slots], default=0)


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
        owned: captured tensors whose gradients have one writer an element.
        addresses: of the af_programs of mask, score and score's derivative, 0 for none, for calls
            within `LIMITS`.
    """

    def __init__(self, spec: Spec, library: Library, artifacts: Artifacts, option: str) -> None:
        self._spec = spec
        self._library = library
        self._artifacts = artifacts
        self._option = option
        self._mods = mods_of(spec)
        derivative = self._mods.derivative
        self.owned = NOTHING_OWNED if derivative is None else owned_captured(derivative)
        self._lock = threading.Lock()
        free_in_child(self)
        self._wide: tuple[int, int, int] | None = None
        self._held: list[object] = []
        self.how = self.reason = ""
        if self._mods.mask is not None or self._mods.score is not None:
            if option == "auto":
                self.reason = unusable_jit()
                if self.reason and not no_jit():
                    _warn_of_llvmlite(self.reason)
            interpreted = option == "interpreter" or self.reason
            self.how = "interpreted" if interpreted else "jit"
        self.addresses = self._make(LIMITS)

    def wide_addresses(self) -> tuple[int, int, int]:
        """Return `addresses` for calls of any size; the first one makes them."""
        with self._lock:
            if self._wide is None:
                self._wide = self._make(WIDE_LIMITS)
            return self._wide

    def _make(self, limits: Limits) -> tuple[int, int, int]:
        compiled: dict[str, NativeFunction] = {}
        if self.how == "jit":
            try:
                compiled = compile_mods(
                    self._mods,
                    captured=self._spec.captured,
                    artifacts=self._artifacts,
                    address=self._library.address,
                    limits=limits,
                    longest=LONGEST if self._option == "auto" else None,
                )
            except TooLong as error:
                # `how` and `reason` describe calls of all sizes, so the limits don't matter here.
                self.how, self.reason = "interpreted", str(error)
        mask, score, derivative = self._mods
        made = (
            self._program(compiled.get("mask"), mask, mask_program, limits),
            self._program(compiled.get("score"), score, score_program, limits),
            self._program(
                compiled.get("score_backward"), derivative, score_backward_program, limits
            ),
        )
        self._held += [compiled, *made]
        mask_at, score_at, backward_at = (
            0 if program is None else ctypes.addressof(program) for program in made
        )
        return mask_at, score_at, backward_at

    def _program(
        self,
        native: NativeFunction | None,
        graph: _Graph | None,
        write: Callable[[_Graph, dict[str, int], Limits], bytes],
        limits: Limits,
    ) -> structs.Program | None:
        if graph is None:
            return None
        if native is not None and not _may_read_outside(graph):
            return structs.Program(native.address, None, 0, native.scratch_bytes)
        code = write(graph, numbers(self._library.operations()), limits)
        # 8-byte words, because bytecode is aligned to them.
        words = (ctypes.c_int64 * -(-len(code) // 8)).from_buffer_copy(code)
        self._held.append(words)
        at = ctypes.addressof(words)
        if native is not None:
            return structs.Program(native.address, at, len(code), native.scratch_bytes)
        scratch = self._library.program_scratch(at)
        return structs.Program(self._library.address("af_interpret"), at, len(code), scratch)


def _may_read_outside(graph: ModGraph | Derivative) -> bool:
    """Whether compiled code needs the graph's bytecode beside it, in which the native library
    finds the first read outside of a captured tensor. A derivative reads where its mod has."""
    return isinstance(graph, ModGraph) and any(
        node.operation == "load" and node.arguments for node in graph.nodes
    )
