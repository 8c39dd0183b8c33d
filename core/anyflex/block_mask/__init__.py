"""Block masks: which blocks of the score matrix are visited, and how they are built."""

from __future__ import annotations

__all__: list[str] = []
