"""Ready-made masks and mods, against definitions of their own in plain Python."""

from __future__ import annotations

from tests.masks.cases import CASES, Case, Made

__all__ = ["CASES", "Case", "Made"]
