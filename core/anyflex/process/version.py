"""Version of the distribution `anyflex`."""

from __future__ import annotations

__all__ = ["VERSION"]

VERSION = "0.1.0"
