"""Triton versions that the kernels were tried with.

Kernels in Gluon aren't taken with another version: Gluon isn't stable, and changes names.
"""

from __future__ import annotations

import re

__all__ = ["TRIED", "untried_triton"]

_OLDEST, _NEWEST = (3, 6), (3, 9)
TRIED = "3.6 to 3.9"
"""The oldest has run, and compiles in the tests as the newest does. With 3.7.1 and 3.8.0 the tests
of what Hopper's and Blackwell's kernels become were run by hand."""


def untried_triton(version: str) -> str | None:
    """Return that a Triton is another than those, or None.

    Args:
        version: its, ``"3.6.0"``; what follows the first two numbers doesn't count.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and _OLDEST <= (int(numbers[1]), int(numbers[2])) <= _NEWEST:
        return None
    return f"Triton {version}, and they were tried with {TRIED}"
