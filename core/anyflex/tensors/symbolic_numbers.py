"""Symbolic numbers: sizes while torch.export or make_fx runs a program to record it.

They are no int and no float to Python, and asking one for its value makes it a constant of the
program. Dynamo has its own: to the code that it inlines they are plain ints and floats.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["INTS", "NUMBERS", "SYMBOLIC", "fixed", "largest", "least", "number_tensors"]

SYMBOLIC = (torch.SymInt, torch.SymFloat)
INTS = (int, torch.SymInt)
NUMBERS = (bool, int, float, *SYMBOLIC)

# torch's two functions have no types.
least: Any = torch.sym_min
"""Smaller of two numbers, without a guard where they are symbolic."""
largest: Any = torch.sym_max
"""Larger of two numbers, likewise."""


def fixed(number: Any) -> Any:
    """Return `number`. Under torch.compile, where it may be a symbol without a text, it becomes a
    constant: each value makes a graph of its own."""
    if not torch.compiler.is_dynamo_compiling():
        return number
    # Dynamo has no call that asks for the value; a range's length needs it.
    return len(range(number)) if number >= 0 else -len(range(-number))


def number_tensors(numbers: list[float]) -> list[Tensor]:
    """Return numbers as the static ops take them: 0-d CPU float64 tensors. Dynamo inlines it."""
    # Arithmetic on a tensor, not a constructor: Dynamo then takes new values without a new graph.
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return [one * number for number in numbers]
