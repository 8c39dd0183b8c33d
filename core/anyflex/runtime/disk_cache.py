"""Disk cache of compiled kernels: named bytes per backend build and spec.

    <cache folder>/artifacts-1/<distribution>-<version>/<key>/<name>

The key is the SHA-256 of distribution, version, core's version, the rules by which this torch
differentiates, the backend's fingerprint and the spec's digest. A file is a line of magic, a line
with the SHA-256 of its name and content, and the content: torn, damaged or foreign files are found
at reading and compiled again. Files are written beside their place and moved into it, so that any
number of processes may share the folder.

The folder must belong to the user and be closed to others (mode 0700): its content is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pathlib
import re
import secrets
import sys
import tempfile
import threading
import warnings
from dataclasses import dataclass

from anyflex.contract.artifacts import Artifacts
from anyflex.errors import ArgumentError, PluginError
from anyflex.process.fork_safe_locks import free_in_child
from anyflex.process.user_frames import user_stacklevel
from anyflex.process.version import VERSION
from anyflex.registry import cached_state, environment
from anyflex.registry.plugin_errors import plugin_error
from anyflex.runtime.used_artifacts import LISTENERS

__all__ = [
    "FOLDER",
    "ORIGIN",
    "Item",
    "Store",
    "artifacts_for",
    "cache_folder",
    "damage",
    "forget",
    "seal",
    "store",
    "unseal",
]

FOLDER = "artifacts-1"
"""Folder inside of the cache folder; the number is the version of its layout."""

_MAGIC = b"anyflex artifact 1\n"
_ANY_MAGIC = b"anyflex artifact "
_HEADER = len(_MAGIC) + 64 + 1
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_CLEARED = ".cleared-"
_ATTEMPTS = 10
ORIGIN = "origin.json"
"""Name of the artifact that says what the others beside it were made from; backends may not use
it. See `anyflex.runtime.artifact_origin`."""
_log = logging.getLogger("anyflex")


def cache_folder() -> pathlib.Path:
    """Return ANYFLEX_CACHE_DIR, or ``anyflex`` in the user's cache folder. It may not exist."""
    chosen = environment.cache_dir()
    if chosen is not None:
        return chosen
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return (pathlib.Path(base) if base else pathlib.Path.home() / "AppData/Local") / "anyflex"
    if sys.platform == "darwin":
        return pathlib.Path.home() / "Library" / "Caches" / "anyflex"
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return pathlib.Path(base) / "anyflex"
    return pathlib.Path.home() / ".cache" / "anyflex"


def seal(name: str, data: bytes) -> bytes:
    """Return an artifact file's bytes."""
    digest = hashlib.sha256(name.encode() + b"\0" + data).hexdigest()
    return b"".join((_MAGIC, digest.encode(), b"\n", data))


def unseal(name: str, file: bytes) -> bytes | None:
    """Return the content of an artifact file, or None if it is damaged or isn't one."""
    data = file[_HEADER:]
    return data if file[:_HEADER] == seal(name, data)[:_HEADER] else None


def damage(file: bytes) -> str:
    """Return the damage of a file that `unseal` refuses."""
    if file.startswith(_ANY_MAGIC) and not file.startswith(_MAGIC):
        return "of another layout, made by another anyflex"
    return "damaged"


def _record(build: str, key: str, name: str, file: bytes) -> None:
    for listen in LISTENERS:
        listen(f"{build}/{key}/{name}", file[len(_MAGIC) : _HEADER - 1])


@dataclass(frozen=True, slots=True)
class Item:
    """One artifact on disk.

    Args:
        build: ``"<distribution>-<version>"``.
        key: which fingerprint and spec.
        name: given by the backend.
        path: of the file.
        size: of the file in bytes.
    """

    build: str
    key: str
    name: str
    path: pathlib.Path
    size: int


class Store:
    """The artifacts of one user.

    Attributes:
        folder: holds them.
        problem: why it can't be used, so that nothing is kept, or None.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder / FOLDER
        self.problem: str | None = None
        self._lock = threading.Lock()
        free_in_child(self)
        self._checked = False

    def get(self, build: str, key: str, name: str) -> bytes | None:
        """Return an artifact, or None if there is none or it is damaged."""
        if not self.usable(create=False):
            return None
        path = self.folder / build / key / name
        try:
            file = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("cache file %s can't be read (%s); compiled anew", path, error)
            return None
        data = unseal(name, file)
        if data is None:
            _log.warning("cache file %s is damaged or foreign; compiled anew", path)
            # It is overwritten anyway; if it were gone, it would log once.
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        # A process that compiles nothing saves a bundle, too.
        _record(build, key, name, file)
        return data

    def sealed(self, build: str, key: str, name: str) -> bytes | None:
        """Return an artifact as its file has it, or None if there is none."""
        try:
            return (self.folder / build / key / name).read_bytes()
        except OSError:
            return None

    def put(self, build: str, key: str, name: str, data: bytes, *, used: bool = True) -> None:
        """Keep an artifact. Never raises because of the disk.

        Args:
            used: this process has compiled it; False: it was loaded from somewhere, and torch's
                next bundle holds it once it is used.
        """
        file = seal(name, data)
        if not self.usable(create=True):
            return
        try:
            self._write(self.folder / build / key, name, file)
        except OSError as error:
            self._give_up(f"{type(error).__name__}: {error}")
        else:
            if used:
                _record(build, key, name, file)

    def _write(self, folder: pathlib.Path, name: str, file: bytes) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                _write_beside(folder, name, file)
                return
            except (FileNotFoundError, FileExistsError):
                # The cache was cleared meanwhile: a folder was gone, or went while mkdir looked at
                # it.
                if attempt == _ATTEMPTS - 1:
                    raise

    def usable(self, *, create: bool) -> bool:
        """Whether the folder can be used; checks owner and mode once, and warns once if not."""
        if self.problem is not None:
            return False
        if self._checked:
            return True
        problem = None
        for _ in range(_ATTEMPTS):
            try:
                if create:
                    self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self.folder.mkdir(mode=0o700, exist_ok=True)
                elif not self.folder.is_dir():
                    return False
                problem = _unsafe(self.folder)
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
            if problem is None or self.folder.exists():
                break  # else the cache was cleared meanwhile
        if problem is not None:
            self._give_up(problem)
            return False
        self._checked = True
        return True

    def _give_up(self, problem: str) -> None:
        with self._lock:
            first, self.problem = self.problem is None, problem
        if not first:
            return
        warnings.warn(
            f"the kernel cache {self.folder} can't be used ({problem}); compiled kernels are kept "
            "in memory only. Set ANYFLEX_CACHE_DIR to a writable folder of your own",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )

    def items(self) -> list[Item]:
        """Return every artifact on disk, sorted."""
        if not self.usable(create=False):
            return []
        found = []
        for path in sorted(self.folder.glob("*/*/*")):
            if not path.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):  # Cleared meanwhile: not there.
                    build, key = path.parts[-3:-1]
                    found.append(Item(build, key, path.name, path, path.stat().st_size))
        return found

    def clear(self) -> int:
        """Delete every artifact and the remains of interrupted writers; return how many artifacts.

        Raises:
            ArgumentError: the folder can't be written.
        """
        count = len(self.items())
        # Moved away first: a writer sees the cache whole or gone, and creates it again.
        try:
            self.folder.rename(self.folder.with_name(f"{_CLEARED}{secrets.token_hex(8)}"))
        except FileNotFoundError:
            _log.debug("there is no cache %s to clear", self.folder)
        except OSError as error:
            raise ArgumentError(f"the cache {self.folder} can't be cleared: {error}") from error
        import shutil

        for path in self.folder.parent.glob(f"{_CLEARED}*"):
            shutil.rmtree(path, ignore_errors=True)
        return count


def _write_beside(folder: pathlib.Path, name: str, file: bytes) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".writing-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(file)
        os.replace(temporary, folder / name)
    except OSError:
        with contextlib.suppress(OSError):  # The first error is the one to report.
            os.unlink(temporary)
        raise


def _unsafe(folder: pathlib.Path) -> str | None:
    """Return why code must not be loaded from `folder`, or None."""
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return "it is not writable"
    if sys.platform == "win32":
        return None
    status = folder.stat()
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & 0o022:
        return f"its mode {status.st_mode & 0o777:o} lets others write; chmod 700"
    return None


@dataclass(slots=True)
class _SpecArtifacts:
    """`Artifacts` of one spec and one backend build."""

    plugin: str
    distribution: str
    build: str
    key: str
    origin: bytes | None
    on_disk: bool

    def get(self, name: str) -> bytes | None:
        self._check(name)
        found = store().get(self.build, self.key, name) if self.on_disk else None
        if found is not None:
            self._keep_origin()
        return found

    def put(self, name: str, data: bytes) -> None:
        self._check(name)
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise self._error(f"data must be bytes, got {type(data).__name__}")
        if self.on_disk:
            self._keep_origin()
            store().put(self.build, self.key, name, bytes(data))

    def _keep_origin(self) -> None:
        # Written beside other artifacts alone: a backend that keeps none has nothing to list or to
        # load.
        origin, self.origin = self.origin, None
        if origin is not None and store().get(self.build, self.key, ORIGIN) is None:
            store().put(self.build, self.key, ORIGIN, origin)

    def _check(self, name: str) -> None:
        if name == ORIGIN:
            raise self._error(f"the name {name!r} is core's own; give another one")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise self._error(
                f"a name must be 1 to 200 letters, digits, '_', '-' or '.', got {name!r}"
            )

    def _error(self, problem: str) -> PluginError:
        problem = f"is broken: artifacts: {problem}"
        return plugin_error(self.plugin, self.distribution, problem)


def artifacts_for(
    *,
    plugin: str,
    package: str,
    version: str,
    fingerprint: str,
    spec_digest: str,
    origin: bytes | None = None,
    on_disk: bool = True,
) -> Artifacts:
    """Return the artifacts of one spec and one backend build.

    Args:
        plugin: the backend's name.
        package, version: of its distribution.
        fingerprint: of the backend.
        spec_digest: ``Spec.digest()``.
        origin: of `anyflex.runtime.artifact_origin.write_origin`, kept beside the backend's
            artifacts; None for none.
        on_disk: False keeps nothing: for backends registered in the process, whose code may
            change without their version.
    """
    from anyflex.mod_graph.torch_derivatives import IN_FORCE

    # Core's passes over mod graphs decide the code that a plugin generates, as its own code does.
    parts = (plugin, package, version, VERSION, IN_FORCE, fingerprint, spec_digest)
    key = hashlib.sha256("\0".join(f"{len(part)}:{part}" for part in parts).encode()).hexdigest()
    build = re.sub(r"[^A-Za-z0-9._+-]", "_", f"{package}-{version}").lstrip(".") or "_"
    return _SpecArtifacts(plugin, f"{package} {version}", build, key, origin, on_disk)


_store: Store | None = None


def store() -> Store:
    """Return the store of this process; its folder is decided at the first call."""
    global _store
    if _store is None:
        _store = Store(cache_folder())
    return _store


def forget() -> None:
    """Look for the folder again at the next use: for tests."""
    global _store
    _store = None


cached_state.on_replaced(forget)
