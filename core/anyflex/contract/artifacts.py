"""Named bytes that a backend keeps for a spec: generated source, compiled code, tuning tables."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Artifacts"]


class Artifacts(Protocol):
    """The part of the disk cache that belongs to one spec and one backend build.

    The key covers distribution, version, ``Backend.fingerprint()`` and the spec, so a backend
    never checks whether an artifact fits. Names are file names without a path. Both methods are
    safe from many threads and processes at once.
    """

    def get(self, name: str) -> bytes | None:
        """Return the bytes stored under `name`, or None if there are none or they are damaged."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Store `data` under `name`, atomically. Never raises because of the disk."""
        ...
