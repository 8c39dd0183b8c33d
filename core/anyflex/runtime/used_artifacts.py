"""Listeners for the artifacts that this process reads or writes."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["LISTENERS"]

LISTENERS: list[Callable[[str, bytes], None]] = []
"""Each takes an artifact's member name, ``"build/key/name"``, and the digest of its content."""
