"""``anyflex bench``: backends and peers measured side by side, in one run."""

from __future__ import annotations

__all__: list[str] = []
