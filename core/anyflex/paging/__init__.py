"""Keys and values in pages: who owns which page, and how new tokens get into them."""

from __future__ import annotations

__all__: list[str] = []
