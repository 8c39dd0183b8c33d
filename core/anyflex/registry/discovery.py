"""Discovery of plugins from installed metadata. Nothing is imported here.

A distribution offers backends in entry-point group ``anyflex.backends.v<contract>`` and hooks in
``anyflex.hooks.v<contract>``. Groups of other contract versions are listed, never loaded.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from importlib.metadata import Distribution

__all__ = ["Copy", "Found", "hidden_copies", "normalized", "scan"]

_GROUP = re.compile(r"anyflex\.(backends|hooks)\.v(\d+)")
_MISSPELT = re.compile(r"anyflex\.?(backend|hook)s?\b.*", re.IGNORECASE)
_log = logging.getLogger("anyflex")


@dataclass(frozen=True, slots=True)
class Found:
    """One entry point, as the metadata has it.

    Args:
        kind: ``"backends"`` or ``"hooks"``.
        contract: version in the group's name.
        name: entry-point name.
        value: ``"module:attribute"``.
        distribution, version: of the distribution that carries it.
    """

    kind: Literal["backends", "hooks"]
    contract: int
    name: str
    value: str
    distribution: str
    version: str


@dataclass(frozen=True, slots=True)
class Copy:
    """One of several copies of a distribution on ``sys.path``.

    Args:
        distribution: its name.
        path: where its metadata is.
        entry_points: ``"group: name"`` of each of its anyflex entry points.
        used: whether anyflex takes its entry points from this copy.
    """

    distribution: str
    path: str
    entry_points: tuple[str, ...]
    used: bool


def normalized(distribution: str) -> str:
    """Return a distribution's name in the form that the packaging standard compares."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def scan() -> tuple[Found, ...]:
    """Return the anyflex entry points of every distribution on ``sys.path``.

    Where a distribution is there more than once, the first copy that has anyflex entry points
    counts. So a stale egg-info without them hides nothing, unlike in
    ``importlib.metadata.entry_points``, which takes the first copy of all.
    """
    from importlib.metadata import distributions

    found: list[Found] = []
    seen: set[str] = set()
    for distribution in distributions():
        entries = _entries(distribution)
        if entries and (name := normalized(entries[0].distribution)) not in seen:
            seen.add(name)
            found += entries
    return tuple(found)


def _entries(distribution: Distribution) -> list[Found]:
    try:
        # Most distributions are skipped here, before anything is parsed, which keeps the scan
        # cheap.
        text = distribution.read_text("entry_points.txt")
        if not text or "anyflex." not in text:
            return []
        name = distribution.metadata["Name"] or "unknown"
        version = distribution.version or "unknown"
        found = []
        for point in distribution.entry_points:
            if match := _GROUP.fullmatch(point.group):
                kind: Literal["backends", "hooks"] = "hooks"
                if match[1] == "backends":
                    kind = "backends"
                found.append(Found(kind, int(match[2]), point.name, point.value, name, version))
            elif _MISSPELT.fullmatch(point.group):
                _log.warning(
                    "%s %s offers %r in the entry-point group %r, which nobody reads: backends "
                    "belong in anyflex.backends.v1, hooks in anyflex.hooks.v1",
                    name,
                    version,
                    point.name,
                    point.group,
                )
        return found
    except Exception as error:  # noqa: BLE001  one damaged package must not hide the others
        _log.warning(
            "the metadata of a distribution at %s can't be read (%s: %s); its plugins are not "
            "seen. Reinstall it",
            _path(distribution),
            type(error).__name__,
            error,
        )
        return []


def _path(distribution: Distribution) -> str:
    return str(getattr(distribution, "_path", "an unknown place"))


def hidden_copies() -> list[tuple[Copy, ...]]:
    """Return, for every distribution that is on ``sys.path`` more than once with different anyflex
    entry points, all its copies in order: a stale egg-info or dist-info to be removed.

    Reads every distribution's metadata, so it is for ``anyflex doctor`` only.
    """
    from importlib.metadata import distributions

    copies: dict[str, list[Copy]] = {}
    for distribution in distributions():
        try:
            name = distribution.metadata["Name"]
        except Exception as error:  # noqa: BLE001  as in _entries, which reports it
            _log.debug("%s: %s", _path(distribution), error)
            continue
        if name:
            points = tuple(
                f"anyflex.{e.kind}.v{e.contract}: {e.name}" for e in _entries(distribution)
            )
            earlier = copies.setdefault(normalized(name), [])
            used = bool(points) and not any(copy.used for copy in earlier)
            earlier.append(Copy(name, _path(distribution), points, used))
    return [
        tuple(group) for group in copies.values() if len({copy.entry_points for copy in group}) > 1
    ]
