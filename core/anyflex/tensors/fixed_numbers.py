"""Integers that torch.compile must take for constants."""

from __future__ import annotations

import torch

__all__ = ["fixed"]


def fixed(number: int) -> int:
    """Return `number`. Under torch.compile, where it may be a symbol without a text, it becomes a
    constant: each value makes a graph of its own."""
    if not torch.compiler.is_dynamo_compiling():
        return number
    # Dynamo has no call that asks for the value; a range's length needs it.
    return len(range(number)) if number >= 0 else -len(range(-number))
