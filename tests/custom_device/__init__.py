"""Tests on a device that torch doesn't know: its open registration (PrivateUse1)."""

from __future__ import annotations

__all__: list[str] = []
