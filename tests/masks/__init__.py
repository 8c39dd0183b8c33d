"""Ready-made masks and mods, against definitions of their own in plain Python.

`CASES`, name -> case, holds one case for each mask and each kind of its arguments.
"""

from __future__ import annotations

from tests.masks import grid_cases, prefix_cases, window_cases  # noqa: F401 (they fill CASES)
from tests.masks.case import CASES, Case, Made

__all__ = ["CASES", "Case", "Made"]
