"""Which Tritons the kernels in Gluon were tried with: Gluon isn't stable, and changes names."""

from __future__ import annotations

import re

__all__ = ["TRIED", "untried_triton"]

_OLDEST, _NEWEST = (3, 6), (3, 9)
TRIED = "3.6 to 3.9"
"""The oldest and the newest compile in the tests; 3.6.0 alone has run."""


def untried_triton(version: str) -> str | None:
    """Return why kernels in Gluon aren't taken with a Triton, or None.

    Args:
        version: its, ``"3.6.0"``; what follows the first two numbers doesn't count.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and _OLDEST <= (int(numbers[1]), int(numbers[2])) <= _NEWEST:
        return None
    return f"Triton {version}, and they were tried with {TRIED}"
