"""Symbolic numbers: sizes while torch.export or make_fx runs a program to record it.

They are no int and no float to Python, and asking one for its value makes it a constant of the
program. Dynamo has its own: to the code that it inlines they are plain ints and floats.
"""

from __future__ import annotations

import torch

__all__ = ["INTS", "NUMBERS", "SYMBOLIC"]

SYMBOLIC = (torch.SymInt, torch.SymFloat)
INTS = (int, torch.SymInt)
NUMBERS = (bool, int, float, *SYMBOLIC)
