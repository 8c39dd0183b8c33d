"""Archive of kernels that travel compiled in a package, for calls that many users make.

It is read only, and is asked for what a spec's artifacts lack. A kernel is found by the name that
it has among those, which says all but the versions that made it. These are the archive's comment,
the backend's fingerprint: with another Triton or other sources nothing is found, and calls
compile their kernels.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ReadyKernels", "write_ready_kernels"]

_OF_LZMA: tuple[type[Exception], ...]
try:
    import lzma
except ImportError:  # zipfile raises a RuntimeError there
    _OF_LZMA = ()
else:
    _OF_LZMA = (lzma.LZMAError,)
_UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, *_OF_LZMA)
"""Exceptions that zipfile raises for a missing or damaged file."""
_log = logging.getLogger(__name__)


class ReadyKernels:
    """The kernels of an archive. Thread-safe.

    Args:
        path: of the archive. It needn't exist.
        fingerprint: the backend's.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path = path
        self._fingerprint = fingerprint

    def get(self, name: str) -> bytes | None:
        """Return a kernel's content, or None where the archive lacks it, is for another
        fingerprint, or can't be read."""
        try:
            with zipfile.ZipFile(self._path) as archive:
                if archive.comment.decode() != self._fingerprint:
                    return None
                return archive.read(name)
        except (FileNotFoundError, KeyError):
            return None
        except _UNREADABLE as error:
            _log.warning("%s can't be read (%s); kernels are compiled anew", self._path, error)
            return None

    def note(self) -> str:
        """Return what doctor says of the archive."""
        try:
            with zipfile.ZipFile(self._path) as archive:
                made_for, count = archive.comment.decode(), len(archive.namelist())
        except FileNotFoundError:
            return "no kernels came compiled with this installation: a wheel brings some"
        except _UNREADABLE as error:
            return f"the kernels that came compiled can't be read: {error}; install again"
        if made_for != self._fingerprint:
            return (
                f"the {count} kernels that came compiled are for {made_for}; here is "
                f"{self._fingerprint}, so none is used"
            )
        return f"{count} kernels came compiled: ready-made masks and mods start without a compile"


def write_ready_kernels(path: Path, fingerprint: str, kernels: Mapping[str, bytes]) -> None:
    """Write an archive, in place of one that is there; equal kernels make equal archives.

    Args:
        kernels: name -> content, uncompressed.
    """
    temporary = path.with_name(f".writing-{path.name}")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_LZMA) as archive:
        archive.comment = fingerprint.encode()
        for name, content in sorted(kernels.items()):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_LZMA)
    os.replace(temporary, path)
