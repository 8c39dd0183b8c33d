"""Spellings: what a mod may write, what it may not, and random expressions."""

from __future__ import annotations

__all__: list[str] = []
