"""Saves the disk cache to one file, and loads such a file: for machines without a compiler, for
images, for CI. Its content is executed, so load only what comes from people you trust; what is
checked here is that it is whole and stays inside of the cache folder."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
import zipfile

from anyflex.errors import ArgumentError
from anyflex.runtime.disk_cache import FOLDER, Store, unseal

__all__ = ["load", "save"]

_MEMBER = re.compile(
    r"([A-Za-z0-9_+-][A-Za-z0-9._+-]{0,199})/([0-9a-f]{64})/([A-Za-z0-9_][A-Za-z0-9._-]{0,199})"
)
_COMMENT = f"anyflex cache {FOLDER}".encode()
LARGEST_MEMBER = 2**30
"""Bytes; a larger one is no artifact but an attempt to fill memory."""


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
        # Not tempfile's: it leaves no mode to the umask.
        temporary = target.with_name(f".writing-{secrets.token_hex(8)}")
        with (
            temporary.open("xb") as stream,
            zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            archive.comment = _COMMENT
            for item in store.items():
                with contextlib.suppress(FileNotFoundError):  # Cleared meanwhile.
                    file = item.path.read_bytes()
                    if unseal(item.name, file) is not None:
                        # A fixed date: equal caches give equal archives.
                        member = zipfile.ZipInfo(f"{item.build}/{item.key}/{item.name}")
                        archive.writestr(member, file, zipfile.ZIP_DEFLATED)
                        count += 1
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):  # The first error is the one to tell.
                temporary.unlink()
        raise ArgumentError(f"the archive {path} can't be written: {error}") from error
    return count


def load(store: Store, path: pathlib.Path) -> int:
    """Put every artifact of an archive into the cache; return how many.

    All are checked before the first is stored.

    Raises:
        ArgumentError: the file is missing, is no archive of this layout, or a member is damaged,
            too large, or would leave the cache folder; or the cache folder can't be written.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.comment != _COMMENT:
                raise ArgumentError(
                    f"{path} is no anyflex cache archive of layout {FOLDER!r}; make it with "
                    "`anyflex cache save` of this version"
                )
            if not store.usable(create=True):
                raise ArgumentError(
                    f"the cache {store.folder} can't be used ({store.problem}); set "
                    "ANYFLEX_CACHE_DIR to a writable folder of your own"
                )
            members = archive.infolist()
            for member in members:
                _read(archive, member, path)
            for member in members:
                build, key, name, data = _read(archive, member, path)
                store.put(build, key, name, data)
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ArgumentError(f"the archive {path} can't be read: {error}") from error
    if store.problem is not None:
        raise ArgumentError(f"the cache {store.folder} can't be written: {store.problem}")
    return len(members)


def _read(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: pathlib.Path
) -> tuple[str, str, str, bytes]:
    match = _MEMBER.fullmatch(member.filename)
    if match is None or ".." in member.filename:
        raise ArgumentError(
            f"the archive {path} has a member {member.filename!r} that is no artifact; nothing "
            "was loaded"
        )
    if member.file_size > LARGEST_MEMBER:
        raise ArgumentError(
            f"the archive {path}: member {member.filename} has {member.file_size} bytes, more "
            f"than the largest artifact ({LARGEST_MEMBER}); nothing was loaded"
        )
    build, key, name = match.groups()
    with archive.open(member) as stream:
        # The size in the directory may lie: never read more than allowed.
        data = unseal(name, stream.read(LARGEST_MEMBER + 1))
    if data is None:
        raise ArgumentError(
            f"the archive {path}: member {member.filename} is damaged; nothing was loaded"
        )
    return build, key, name, data
