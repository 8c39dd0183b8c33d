"""Which closed-over numbers are constants of a kernel, and which are run-time scalars.

A number is a constant until it is seen with a second value; from then on it is a run-time scalar
for every mod of that structure. So a number that changes between calls compiles at most twice, and
thirty layers whose mods differ in their numbers share two kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

__all__ = ["Bound", "NumberHistory", "forget_numbers", "history_of"]

Bound = tuple[int | float | None, ...]
"""Values of the ints, then the floats; None for a run-time scalar."""

HISTORIES = 4096


class NumberHistory:
    """What was seen of the numbers of one structure."""

    __slots__ = ("_bound", "_first", "_last", "_lock", "_varying")

    def __init__(self) -> None:
        self._first: tuple[int | float, ...] | None = None
        self._last: tuple[int | float, ...] | None = None
        self._bound: Bound = ()
        self._varying: set[int] = set()
        self._lock = threading.Lock()

    def bind(self, ints: Sequence[int], floats: Sequence[float]) -> Bound:
        """Note these values, and return the constants among them."""
        values = (*ints, *floats)
        # One read each: another thread may note other values in between.
        last, bound = self._last, self._bound
        if values == last:
            return bound
        with self._lock:
            if self._first is None:
                self._first = values
            for i, (first, value) in enumerate(zip(self._first, values, strict=True)):
                # NaN differs from itself, and 0.0 equals -0.0: neither can be compared, so
                # neither is ever a constant.
                if first != value or (value == 0 and isinstance(value, float)):
                    self._varying.add(i)
            varying = self._varying
            bound = tuple(None if i in varying else v for i, v in enumerate(values))
            # `_bound` is published before `_last`, so a reader that finds its values in `_last`
            # reads a `_bound` at least as new.
            self._bound = bound
            self._last = values if all(v == v for v in values) else None
        return bound


_histories: dict[tuple[str, str], NumberHistory] = {}
_lock = threading.Lock()


def history_of(score: str, mask: str) -> NumberHistory:
    """Return the history of this pair of graph texts."""
    history = _histories.get((score, mask))
    if history is None:
        with _lock:
            if len(_histories) >= HISTORIES:
                del _histories[next(iter(_histories))]
            history = _histories.setdefault((score, mask), NumberHistory())
    return history


def forget_numbers() -> None:
    """Make every number a constant again."""
    with _lock:
        _histories.clear()
