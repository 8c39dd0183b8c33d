"""Spellings: those that a mod may use, those that it may not, and random expressions."""

from __future__ import annotations

__all__: list[str] = []
