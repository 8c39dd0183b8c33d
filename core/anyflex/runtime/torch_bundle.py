"""anyflex's part of torch's cache bundle, ``torch.compiler.save_cache_artifacts``.

torch collects what a process compiles in ``CacheArtifactManager``, and lets others register a type
of their own (https://github.com/pytorch/pytorch/pull/152977). A bundle that holds a type which
isn't registered is lost whole, torch's own part too: so this module is loaded by `import anyflex`.
"""

from __future__ import annotations

import logging
from typing import Any

from anyflex.runtime.used_artifacts import LISTENERS
from anyflex.tensors.torch_versions import artifact_types, torch_cache

__all__ = ["TYPE", "record"]

TYPE = "anyflex"
"""Name of the artifact type; part of each bundle."""

_log = logging.getLogger("anyflex")


class _Digest(bytes):
    """Stands for the content of an artifact that this process has used: its file's seal. The file
    is read when a bundle is saved, so that a long process holds no copy of every kernel."""


def record(member: str, digest: bytes) -> None:
    """Let the next bundle hold an artifact.

    Args:
        member: ``"build/key/name"``.
        digest: of its content: a tuning table that has changed is recorded again.
    """
    torch_cache.CacheArtifactManager.record_artifact(TYPE, member, _Digest(digest))


_Artifact: Any = object if torch_cache is None else torch_cache.CacheArtifact


class AnyflexArtifact(_Artifact):  # type: ignore[misc]
    """One artifact: recorded, with its file read late, or out of a bundle."""

    def __init__(self, key: str, content: bytes) -> None:
        # The base is a frozen dataclass.
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "_given", content)

    @property
    def content(self) -> bytes:
        given: bytes = self._given
        return _file_of(self.key) if isinstance(given, _Digest) else given

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((self.key, self._given))

    def populate_cache(self) -> None:
        """Put the artifact into the cache. A failure is one log line: an exception would keep
        torch from the rest of the bundle."""
        try:
            from anyflex.runtime.cache_archive import restore
            from anyflex.runtime.disk_cache import store

            restore(store(), self.key, self.content)
        # A warning may have been made an exception.
        except Exception as error:  # noqa: BLE001
            _log.warning(
                "artifact %r of torch's cache bundle isn't loaded: %s: %s",
                self.key,
                type(error).__name__,
                error,
            )

    @staticmethod
    def type() -> str:
        return TYPE


def _file_of(member: str) -> bytes:
    """Return an artifact's sealed file, or nothing, with a log line, where it is gone."""
    from anyflex.runtime.disk_cache import store

    file = store().sealed(*member.split("/"))
    if file is None:
        _log.warning("artifact %s is gone from the cache: the bundle lacks it", member)
        return b""
    return file


# A second `register` asserts: this module was loaded again, and the first one's class serves.
if torch_cache is not None and TYPE not in artifact_types:
    torch_cache.CacheArtifactFactory.register(AnyflexArtifact)
    LISTENERS.append(record)
