"""Specialization of closed-over numbers: which are constants of a kernel, and which are run-time
scalars.

A number is a constant until it is seen with a second value; from then on it is a run-time scalar
for every mod of that structure. So a number that changes between calls compiles at most twice, and
thirty layers whose mods differ in their numbers share two kernels.
"""

from __future__ import annotations

import sys
import threading

from anyflex.process.fork_safe_locks import free_in_child

__all__ = ["Bound", "NumberHistory", "bind_numbers", "forget_numbers"]

Bound = tuple[int | float | None, ...]
"""Values of the ints, then the floats; None for a run-time scalar."""

HISTORIES = 4096


class NumberHistory:
    """Numbers seen so far for one structure."""

    __slots__ = ("__weakref__", "_first", "_lock", "_varying", "bound", "last")

    def __init__(self) -> None:
        self._first: tuple[int | float, ...] | None = None
        self.last: tuple[int | float, ...] | None = None
        self.bound: Bound = ()
        self._varying: set[int] = set()
        self._lock = threading.Lock()
        free_in_child(self)

    def note(self, values: tuple[int | float, ...]) -> Bound:
        """Note these values, and return the constants among them."""
        with self._lock:
            if self._first is None:
                self._first = values
            for i, (first, value) in enumerate(zip(self._first, values, strict=True)):
                # NaN differs from itself, and 0.0 equals -0.0: neither can be compared, so neither
                # is ever a constant.
                if first != value or (value == 0 and isinstance(value, float)):
                    self._varying.add(i)
            varying = self._varying
            bound = tuple(None if i in varying else v for i, v in enumerate(values))
            # `bound` is published before `last`, so a reader that finds its values in `last` reads
            # a `bound` at least as new.
            self.bound = bound
            self.last = values if all(v == v for v in values) else None
        return bound


_histories: dict[tuple[str, str], NumberHistory] = {}
_lock = threading.Lock()
free_in_child(sys.modules[__name__])


def bind_numbers(
    score: str, mask: str, ints: tuple[int, ...], floats: tuple[float, ...]
) -> tuple[NumberHistory, Bound]:
    """Note the numbers of a call with these graph texts; return the texts' history, and the
    constants among the numbers."""
    history = _histories.get((score, mask))
    if history is None:
        with _lock:
            if len(_histories) >= HISTORIES:
                del _histories[next(iter(_histories))]
            history = _histories.setdefault((score, mask), NumberHistory())
    # One read each: another thread may note other values in between.
    last = history.last
    bound = history.bound
    values = (*ints, *floats)
    return history, bound if values == last else history.note(values)


def forget_numbers() -> None:
    """Make every number a constant again."""
    with _lock:
        _histories.clear()
