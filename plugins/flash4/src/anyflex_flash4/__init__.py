"""FlashAttention-4 as an anyflex backend: a peer to measure against."""

from __future__ import annotations

__all__: list[str] = []
