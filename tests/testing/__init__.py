"""Tests of the conformance kit."""

from __future__ import annotations

__all__: list[str] = []
