"""Ways of change: a score mod that reads a value, and the steps that change it.

A step returns None, or the mod that replaces the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["WAYS", "ScoreMod", "Step", "Way", "way"]

ScoreMod = Callable[..., Any]
Step = Callable[[], ScoreMod | None]
Way = Callable[[], tuple[ScoreMod, list[Step]]]

WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    """Enter a way under its name."""
    WAYS[function.__name__] = function
    return function
