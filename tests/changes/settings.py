"""A module whose attributes a mod reads: the ways change them."""

from __future__ import annotations

from typing import Any

__all__: list[str] = []

WEIGHT: Any = 0.5
BIAS: Any = None
MODE = "half"


def halved(s: Any) -> Any:
    return s * 0.5


def tripled(s: Any) -> Any:
    return s * 3.0


transform = halved
