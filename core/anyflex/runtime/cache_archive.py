"""Archive of the disk cache: one file for machines without a compiler, for images, for CI. Its
content is executed, so load only archives from people you trust; the checks here are that it is
whole and stays inside of the cache folder."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pathlib
import re
import secrets
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import IO, overload

from anyflex.errors import ArgumentError, ArgumentTypeError
from anyflex.runtime import artifact_origin
from anyflex.runtime.disk_cache import FOLDER, ORIGIN, Store, damage, store, unseal

__all__ = ["Loaded", "load_artifacts", "restore", "save", "save_artifacts"]

_MEMBER = re.compile(
    r"([A-Za-z0-9_+-][A-Za-z0-9._+-]{0,199})/([0-9a-f]{64})/([A-Za-z0-9_][A-Za-z0-9._-]{0,199})"
)
_COMMENT = f"anyflex cache {FOLDER}".encode()
_UNREADABLE = (
    OSError, EOFError, MemoryError, RuntimeError, ValueError, struct.error, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip
"""Exceptions that zipfile raises for a file with a flipped byte, depending on where, and for a
member larger than memory; NotImplementedError is a RuntimeError."""
_log = logging.getLogger("anyflex")


@dataclass(frozen=True, slots=True)
class Loaded:
    """Outcome of loading an archive.

    Args:
        artifacts: how many are in the cache now.
        skipped: how many are not, because no call in this environment would find them.
        reasons: why, one line a reason, each with its number of artifacts.
    """

    artifacts: int
    skipped: int
    reasons: tuple[str, ...]


@overload
def save_artifacts(path: None = None) -> bytes: ...
@overload
def save_artifacts(path: str | os.PathLike[str]) -> pathlib.Path: ...
def save_artifacts(path: str | os.PathLike[str] | None = None) -> bytes | pathlib.Path:
    """Write every compiled kernel of the disk cache to one file, as ``anyflex cache save`` does.

    Args:
        path: of the file, which is replaced; None returns its content.

    Returns:
        The content, or the file's path.

    Raises:
        ArgumentError: the file can't be written, or the cache folder can't be used.
    """
    cache = store()
    _check_usable(cache)
    if path is None:
        stream = io.BytesIO()
        _pack(cache, stream)
        return stream.getvalue()
    target = pathlib.Path(path)
    save(cache, target)
    return target


def load_artifacts(source: str | os.PathLike[str] | bytes) -> Loaded:
    """Put the kernels that `save_artifacts` wrote into the disk cache, as ``anyflex cache load``
    does. **They are executed later: load only what comes from people you trust.**

    All are checked before the first is stored. Artifacts that no call in this environment would
    find (another anyflex, Triton, backend, processor or GPU, a torch that differentiates
    otherwise) are left out, with a log line a reason.

    Args:
        source: path of the file, or its content.

    Raises:
        ArgumentTypeError: `source` is neither.
        ArgumentError: the file is missing, is no archive of this layout, or a member is damaged or
            would leave the cache folder; or the cache folder can't be written.
    """
    if not isinstance(source, (str, os.PathLike, bytes, bytearray, memoryview)):
        raise ArgumentTypeError(
            "load_artifacts takes a path or the bytes of save_artifacts, got "
            f"{type(source).__name__}"
        )
    cache = store()
    if isinstance(source, (str, os.PathLike)):
        path: object = os.fspath(source)
        stream: str | IO[bytes] = os.fspath(source)
    else:
        path, stream = f"of {len(source)} bytes", io.BytesIO(source)
    try:
        with zipfile.ZipFile(stream) as archive:
            if archive.comment != _COMMENT:
                raise ArgumentError(
                    f"the archive {path} is no anyflex cache archive of layout {FOLDER!r}; make "
                    "it with `anyflex cache save` of this version"
                )
            _check_usable(cache)
            # Read twice, one at a time: all are checked before the first is stored, and an archive
            # may be larger than memory.
            members = archive.infolist()
            refused = {
                (build, key): reason
                for build, key, name, data in (_read(archive, each, path) for each in members)
                if name == ORIGIN and (reason := artifact_origin.mismatch(data)) is not None
            }
            skipped: Counter[str] = Counter()
            for member in members:
                build, key, name, data = _read(archive, member, path)
                if (build, key) in refused:
                    skipped[refused[build, key]] += 1
                else:
                    cache.put(build, key, name, data, used=False)
    except ArgumentError:
        raise
    except _UNREADABLE as error:
        raise ArgumentError(f"the archive {path} can't be read: {error}") from error
    if cache.problem is not None:
        raise ArgumentError(f"the cache {cache.folder} can't be written: {cache.problem}")
    reasons = tuple(f"{count} artifacts {reason}" for reason, count in sorted(skipped.items()))
    for reason in reasons:
        _log.warning("the archive %s: not loaded: %s", path, reason)
    return Loaded(len(members) - skipped.total(), skipped.total(), reasons)


def _check_usable(cache: Store) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error reports it
        usable = cache.usable(create=True)
    if not usable:
        raise ArgumentError(
            f"the cache {cache.folder} can't be used ({cache.problem}); set ANYFLEX_CACHE_DIR to "
            "a writable folder of your own"
        )


def save(store: Store, path: pathlib.Path) -> int:
    """Write every whole artifact to `path`, replacing a file at the end; return how many. A link
    stays, and its target is replaced.

    Raises:
        ArgumentError: the file can't be written, or what is there is no regular file.
    """
    count = 0
    temporary = None
    try:
        target = pathlib.Path(os.path.realpath(path))
        # A rename would put a file in place of a device or a pipe.
        if target.exists() and not target.is_file():
            raise ArgumentError(
                f"the archive {path} can't be written: what is there is no regular file; give "
                "another path"
            )
        # Not a file of tempfile, which doesn't leave the mode to the umask.
        temporary = target.with_name(f".writing-{secrets.token_hex(8)}")
        with temporary.open("xb") as stream:
            count = _pack(store, stream)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):  # The first error is the one to report.
                temporary.unlink()
        raise ArgumentError(f"the archive {path} can't be written: {error}") from error
    return count


def _pack(store: Store, stream: IO[bytes]) -> int:
    count = 0
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = _COMMENT
        for item in store.items():
            with contextlib.suppress(FileNotFoundError):  # Cleared meanwhile.
                file = item.path.read_bytes()
                if unseal(item.name, file) is not None:
                    # A fixed date: equal caches give equal archives.
                    member = zipfile.ZipInfo(f"{item.build}/{item.key}/{item.name}")
                    archive.writestr(member, file, zipfile.ZIP_DEFLATED)
                    count += 1
    return count


def restore(store: Store, member: str, file: bytes) -> None:
    """Put one sealed file into the cache.

    Args:
        member: ``"build/key/name"``.

    Raises:
        ValueError: it is no artifact, or damaged.
    """
    store.put(*_opened(member, file), used=False)


def _read(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: object
) -> tuple[str, str, str, bytes]:
    file = archive.read(member)
    try:
        return _opened(member.filename, file)
    except ValueError as error:
        raise ArgumentError(
            f"the archive {path}: member {member.filename!r}: {error}; nothing was loaded"
        ) from error


def _opened(member: str, file: bytes) -> tuple[str, str, str, bytes]:
    """Return an artifact's build, key, name and content."""
    match = _MEMBER.fullmatch(member)
    if match is None or ".." in member:
        raise ValueError("its name is no artifact's")
    build, key, name = match.groups()
    data = unseal(name, file)
    if data is None:
        raise ValueError(f"it is {damage(file)}")
    return build, key, name, data
