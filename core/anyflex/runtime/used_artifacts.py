"""Record of the artifacts that this process has used, for registered listeners."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["note", "tell"]

_told: list[Callable[[str, bytes], None]] = []


def tell(listener: Callable[[str, bytes], None]) -> None:
    """Call `listener` for each artifact that is read or written.

    It takes the artifact's member name, ``"build/key/name"``, and the digest of its content.
    """
    _told.append(listener)


def note(member: str, digest: bytes) -> None:
    """Report an artifact to the listeners."""
    for listener in _told:
        listener(member, digest)
