"""Symbolic numbers: sizes while torch.export or make_fx runs a program to record it.

They are no int and no float to Python, and asking one for its value makes it a constant of the
program. Dynamo has its own: to the code that it inlines they are plain ints and floats.
"""

from __future__ import annotations

import torch

__all__ = ["INTS", "NUMBERS", "SYMBOLIC", "fixed"]

SYMBOLIC = (torch.SymInt, torch.SymFloat)
INTS = (int, torch.SymInt)
NUMBERS = (bool, int, float, *SYMBOLIC)


def fixed(number: int) -> int:
    """Return `number`. Under torch.compile, where it may be a symbol without a text, it becomes a
    constant: each value makes a graph of its own."""
    if not torch.compiler.is_dynamo_compiling():
        return number
    # Dynamo has no call that asks for the value; a range's length needs it.
    return len(range(number)) if number >= 0 else -len(range(-number))
