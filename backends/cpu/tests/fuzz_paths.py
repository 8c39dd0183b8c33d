"""Paths that the native code takes, derived from its answers about the problems it is given.

The native code's own plans tell: a workspace has room for each split's records and for each part's
sums, so that its size tells how many there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from itertools import pairwise

from anyflex_cpu import structs
from anyflex_cpu.library import Library

__all__ = ["OF_LARGE", "Paths"]

OF_LARGE = (
    "head dims above 64",
    "prefill over several tiles of keys",
    "decode of more than 16 rows",
    "decode of 9 to 16 rows",
    "decode in splits",
    "decode in splits on several threads",
    "backward in several parts",
    "a mask with gaps over several tiles of keys",
)
"""Paths that only large calls reach, at every level."""

# Constants that the library doesn't export.
TILES = {"prefill": 256, "decode": 512}  # keys: tile_columns, decode_columns in *_plan.h
FEW_BYTES = 10**6  # of keys and values: decode_threads in decode.cpp, threads_worth in tiles.h


class Paths:
    """Listens to a library's calls.

    Args:
        library: its functions are replaced by ones that note the call and then make it.

    Attributes:
        taken: names of the paths that calls have taken, until it is cleared.
    """

    def __init__(self, library: Library) -> None:
        self.taken: set[str] = set()
        self._library = library
        library.forward = self._noting(library.forward, self._forward)
        library.backward = self._noting(library.backward, self._backward)

    def _noting(
        self, plain: Callable[..., int], names: Callable[[structs.Problem], Iterator[str]]
    ) -> Callable[..., int]:
        def call(address: int, error: int) -> int:
            # The arguments of both begin with their problem.
            problem = structs.Problem.from_address(address)
            if problem.batch * problem.q_heads * problem.q_length * problem.kv_length > 0:
                self.taken.update(names(problem))
            return plain(address, error)

        return call

    def _forward(self, p: structs.Problem) -> Iterator[str]:
        variant = self._library.variant(ctypes.addressof(p))
        yield variant
        if max(p.head_dim, p.value_head_dim) > 64:
            yield "head dims above 64"
        if p.kv_length > TILES[variant] and has_gaps(p):
            yield "a mask with gaps over several tiles of keys"
        if variant == "prefill":
            if p.kv_length > TILES["prefill"]:
                yield "prefill over several tiles of keys"
            return
        # Heads with rows of runs of their own are decoded one by one.
        together = 1 if p.has_mask and p.runs.heads > 1 else p.q_heads // p.kv_heads
        if together * p.q_length > 16:
            yield "decode of more than 16 rows"
        elif together * p.q_length > 8:
            yield "decode of 9 to 16 rows"
        if self._is_split(p):
            yield "decode in splits"
            element = 4 if p.dtype == 0 else 2
            elements = p.batch * p.kv_heads * p.kv_length * (p.head_dim + p.value_head_dim)
            if p.threads > 1 and elements * element >= FEW_BYTES:
                yield "decode in splits on several threads"

    def _backward(self, p: structs.Problem) -> Iterator[str]:
        yield "backward"
        if self._parts(p, p.kv_length) > 1:
            yield "backward in several parts"
        # A part has at least two tiles: 512 keys of few heads are one part, or two where tiles
        # have 128 keys.
        if p.kv_length > 128 and self._parts(p, 512) == 1:
            yield "backward in tiles of 256 keys"

    def _is_split(self, p: structs.Problem) -> bool:
        """Whether decoding is split: only the records grow with the keys. A split has at least
        1024 keys, and a call with fewer than 256 may not be decoded."""
        few = min(p.kv_length, 256)
        return self._decode_bytes(p, p.kv_length) > self._decode_bytes(p, few)

    def _decode_bytes(self, p: structs.Problem, keys: int) -> int:
        other = changed(p, kv_length=keys)
        return self._library.forward_workspace(ctypes.addressof(other))

    def _parts(self, p: structs.Problem, keys: int) -> int:
        """Number of parts: each part has its own sums of dQ; a call with one key has one part."""
        return self._sums_bytes(p, keys) // self._sums_bytes(p, 1)

    def _sums_bytes(self, p: structs.Problem, keys: int) -> int:
        """Bytes that the sums of dQ add to the workspace of one thread."""
        found = []
        for wanted in (0b111, 0b110):
            other = changed(p, kv_length=keys, threads=1, wanted=wanted)
            found.append(self._library.backward_workspace(ctypes.addressof(other), 0, 0))
        return found[0] - found[1]


def changed(problem: structs.Problem, **values: int) -> structs.Problem:
    """A copy with other values."""
    copy = structs.Problem.from_buffer_copy(problem)
    for name, value in values.items():
        setattr(copy, name, value)
    return copy


def has_gaps(p: structs.Problem) -> bool:
    """Whether some row of blocks has several runs."""
    if not p.has_mask:
        return False
    rows = p.runs.batch * p.runs.heads * (p.runs.blocks + 1)
    offsets = (ctypes.c_int32 * rows).from_address(p.runs.offsets)
    return any(after - before > 1 for before, after in pairwise(offsets))
