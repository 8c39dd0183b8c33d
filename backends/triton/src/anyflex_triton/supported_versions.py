"""Triton versions that the kernels were tried with.

Kernels in Gluon are refused for other versions: Gluon isn't stable, and changes names.
"""

from __future__ import annotations

import re

__all__ = ["TRIED", "untried_triton"]

_OLDEST, _NEWEST = (3, 6), (3, 9)
TRIED = "3.6 to 3.9"
"""Versions of Triton that the kernels were tried with. The oldest has run, and compiles in the
tests as the newest does. With 3.7.1 and 3.8.0 the tests of Hopper's and Blackwell's compiled
kernels were run by hand."""


def untried_triton(version: str) -> str | None:
    """Return a note that a version of Triton is untried, or None.

    Args:
        version: as in ``"3.6.0"``; only the first two numbers count.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and _OLDEST <= (int(numbers[1]), int(numbers[2])) <= _NEWEST:
        return None
    return f"Triton {version}, and they were tried with {TRIED}"
