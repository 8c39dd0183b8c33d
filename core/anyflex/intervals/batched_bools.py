"""Flags: one bool for all cells, or a bool tensor [n] with one a cell.

Plain bools spare the tensor operations, which are what building a mask costs below 128k elements.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["Flag", "both", "either", "inverse"]

Flag = bool | Tensor


def both(*flags: Flag) -> Flag:
    """Return the conjunction."""
    result: Flag = True
    for flag in flags:
        if flag is False:
            return False
        if flag is not True:
            result = flag if result is True else result & flag
    return result


def either(*flags: Flag) -> Flag:
    """Return the disjunction."""
    result: Flag = False
    for flag in flags:
        if flag is True:
            return True
        if flag is not False:
            result = flag if result is False else result | flag
    return result


def inverse(flag: Flag) -> Flag:
    """Return the negation."""
    return ~flag if isinstance(flag, Tensor) else not flag
