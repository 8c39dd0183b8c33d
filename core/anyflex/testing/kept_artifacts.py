"""Artifacts in memory, kept from another process."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KeptArtifacts"]


class KeptArtifacts:
    """Artifacts of one spec, kept in a dictionary."""

    def __init__(self, stored: Mapping[str, bytes] | None = None) -> None:
        self.stored = dict(stored or {})

    def get(self, name: str) -> bytes | None:
        """See `anyflex.plugin.Artifacts`."""
        return self.stored.get(name)

    def put(self, name: str, data: bytes) -> None:
        """See `anyflex.plugin.Artifacts`."""
        self.stored[name] = bytes(data)
