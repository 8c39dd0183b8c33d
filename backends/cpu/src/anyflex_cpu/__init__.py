"""anyflex's CPU backend: attention kernels in a native library, mods on tiles of scores."""

from __future__ import annotations

__all__: list[str] = []
