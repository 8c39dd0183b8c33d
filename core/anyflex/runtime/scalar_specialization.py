"""Specialization of closed-over numbers: which are constants of a kernel, and which are run-time
scalars.

A number is a constant until it is seen with a second value; from then on it is a run-time scalar
for every mod of that structure. So a number that changes between calls compiles at most twice, and
thirty layers whose mods differ in their numbers share two kernels.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Bound", "bind_numbers", "forget_numbers"]

Bound = tuple[int | float | None, ...]
"""Values of the ints, then the floats; None for a run-time scalar."""

HISTORIES = 4096


class _History(NamedTuple):
    """Numbers of the calls of one structure: of the last one, and which of them are constants."""

    last: tuple[int | float, ...]
    bound: Bound


_histories: dict[tuple[str, str], _History] = {}


def bind_numbers(score: str, mask: str, ints: tuple[int, ...], floats: tuple[float, ...]) -> Bound:
    """Note the numbers of a call with these graph texts, and return the constants among them.

    Threads that note other numbers at the same time may each take theirs for constants, and
    compile once more.
    """
    history = _histories.get((score, mask))
    values = (*ints, *floats)
    if history is not None and values == history.last:
        return history.bound
    if history is None and len(_histories) >= HISTORIES:
        _histories.clear()
    constants = values if history is None else history.bound
    # NaN differs from itself, and 0.0 equals -0.0: neither can be compared, so neither is ever a
    # constant.
    bound = tuple(
        value if value == constant and (value != 0 or isinstance(value, int)) else None
        for value, constant in zip(values, constants, strict=True)
    )
    _histories[score, mask] = _History(values, bound)
    return bound


def forget_numbers() -> None:
    """Make every number a constant again."""
    _histories.clear()
