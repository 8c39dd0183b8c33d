"""Tests of the registry, the kernel cache and the disk cache."""

from __future__ import annotations

__all__: list[str] = []
